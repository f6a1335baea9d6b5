import math

import pytest
import torch

from lit_qrl.callbacks import AIS, MaskedIS, TruncatedIS
from lit_qrl.callbacks.rejection import GeometricRejection, OffPolicySequenceMask, RatioRejection, TokenVeto
from lit_qrl.errors import ConfigError
from lit_qrl.functional.rejection import opsm_keep, ratio_keep
from lit_qrl.loop.correction import check_combination, combine
from lit_qrl.objective import GRPO, TBPO
from tests.callbacks.corrections import context
from tests.functional.helpers import listed, no_host_sync


def test_rejects_by_the_ratio_per_token():
    given = context()
    with no_host_sync():
        got = GeometricRejection(lower=0.8, upper=1.2).correct(None, None, given)
    rows = listed(given.log_ratio, given.mask)
    wanted = [not row or 0.8 <= math.exp(sum(row) / len(row)) <= 1.2 for row in rows]
    for i, kept in enumerate(wanted):
        assert (got.keep[i] | ~given.mask[i]).all() == kept
        assert (got.keep[i] & given.mask[i]).any() == (kept and bool(rows[i]))
    share = float(got.metrics["correction/geometric_rejected_sequences"])
    assert share == pytest.approx(wanted.count(False) / 7)
    assert got.weights is None


def test_one_catastrophic_token_drops_its_sequence():
    given = context()
    with no_host_sync():
        got = TokenVeto().correct(None, None, given)
    # Row 4 holds the log-ratio of −30, row 2 the one of +30.
    assert [bool((k | ~m).all()) for k, m in zip(got.keep, given.mask, strict=True)] == [i != 4 for i in range(8)]
    assert not (got.keep[4] & given.mask[4]).any()
    assert float(got.metrics["correction/vetoed_sequences"]) == pytest.approx(1 / 7)


def test_negative_sequences_that_drifted_are_dropped():
    given = context(spread=1.0)
    with no_host_sync():
        got = OffPolicySequenceMask(0.05).correct(None, None, given)
    assert torch.equal(got.keep, opsm_keep(given.log_ratio, given.mask, given.advantages, 0.05))
    dropped = (~got.keep).any(1)
    assert dropped.any()
    assert (given.advantages[dropped] < 0).all()
    assert float(got.metrics["correction/off_policy_sequences"]) == pytest.approx(int(dropped.sum()) / 7)


@pytest.mark.parametrize(
    ("rejects", "options"),
    [(GeometricRejection, {"upper": 1.2, "lower": None}), (OffPolicySequenceMask, {"delta": 0.05}), (TokenVeto, {})],
)
def test_counted_rejections_become_weights_of_zero(rejects, options):
    given = context(spread=1.0)
    plain = rejects(**options).correct(None, None, given)
    counted = rejects(**options, count_rejected=True).correct(None, None, given)
    assert counted.keep is None
    assert torch.equal(counted.weights, plain.keep.double())
    assert not plain.keep.all()


@pytest.mark.parametrize("over", ["token", "mean", "sum", "max"])
@pytest.mark.parametrize("divergence", ["k1", "k2", "k3"])
def test_ratio_rejection_keeps_what_its_rule_keeps_and_weighs_nothing(divergence, over):
    given = context()
    upper = 1.5 if divergence == "k1" else 0.1
    with no_host_sync():
        got = RatioRejection(upper, divergence=divergence, over=over).correct(None, None, given)
    wanted = ratio_keep(given.log_ratio, given.mask, None, upper, divergence, over)
    assert torch.equal(got.keep, wanted)
    assert got.weights is None
    assert list(got.metrics) == [f"correction/rejected_{over}_{divergence}"]
    hits, units = ~wanted & given.mask, given.mask
    if over != "token":
        hits, units = hits.any(1), units.any(1)
    assert float(got.metrics[f"correction/rejected_{over}_{divergence}"]) == pytest.approx(
        float(hits.sum() / units.sum())
    )


def test_rejections_of_different_kinds_stand_beside_each_other_and_beside_every_carrier():
    both = [RatioRejection(2.0, over="sum"), RatioRejection(0.01, divergence="k3"), GeometricRejection()]
    for carrier in (AIS(), TruncatedIS(), MaskedIS()):
        check_combination([carrier, *both], GRPO())
    check_combination(both, TBPO())
    check_combination(both, GRPO(old_logprobs="bypass"))
    tbpo = TBPO()
    tbpo.old_logprobs = "bypass"
    with pytest.raises(ConfigError, match="TBPO would multiply"):
        check_combination(both, tbpo)
    with pytest.raises(ConfigError, match="RatioRejection twice"):
        check_combination([RatioRejection(2.0), *both, RatioRejection(3.0, over="sum")])
    given = context()
    parts = [callback.correct(None, None, given) for callback in (TruncatedIS(), *both)]
    weights, keep, metrics = combine(parts, given.mask)
    assert torch.equal(weights, parts[0].weights)
    assert torch.equal(keep, parts[1].keep & parts[2].keep & parts[3].keep)
    assert "correction/rejected_sum_k1" in metrics
