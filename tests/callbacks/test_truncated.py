import math

import pytest
import torch

from lit_qrl.callbacks.truncated import MaskedIS, TruncatedIS
from lit_qrl.functional import importance as F
from tests.callbacks.corrections import context
from tests.functional.helpers import Ranks, listed, no_host_sync

LEVELS = {"token": 2.0, "sequence": 5.0, "geometric": 2.0}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("kind", "corrects"), [("truncated", TruncatedIS), ("masked", MaskedIS)])
def test_default_bounds_of_each_level(level, kind, corrects):
    given, upper = context(), LEVELS[level]
    with no_host_sync():
        got = corrects(level).correct(None, None, given)
    lower = 0.0 if kind == "truncated" else 1 / upper
    bounds = {"lower": lower, "upper": upper}
    assert torch.equal(got.weights, getattr(F, f"{kind}_weights")(given.log_ratio, given.mask, **bounds, level=level))
    assert got.keep is None
    rows = [row for row in listed(given.log_ratio, given.mask) if row]
    ratios = {
        "token": [math.exp(x) for row in rows for x in row],
        "sequence": [math.exp(sum(row)) for row in rows],
        "geometric": [math.exp(sum(row) / len(row)) for row in rows],
    }[level]
    changed = float(got.metrics[f"correction/{kind}_{'tokens' if level == 'token' else 'sequences'}"])
    assert changed == pytest.approx(sum(not lower <= ratio <= upper for ratio in ratios) / len(ratios))
    assert changed > 0


def test_lower_bound_and_its_reciprocal():
    given = context()
    got = TruncatedIS(upper=1.25, lower=None).correct(None, None, given)
    assert torch.equal(got.weights, F.truncated_weights(given.log_ratio, given.mask, 1.25, 0.8))


def test_measured_bound_is_logged_and_global():
    given = context(huge=1.0)
    with no_host_sync():
        got = TruncatedIS("sequence", upper="auto").correct(None, None, given)
    upper = F.adaptive_upper(given.log_ratio, given.mask)
    assert torch.equal(got.metrics["correction/upper"], upper)
    assert torch.equal(got.weights, F.truncated_weights(given.log_ratio, given.mask, upper, level="sequence"))
    parts = Ranks(2).run(
        lambda r, f: TruncatedIS("sequence", upper="auto").correct(
            None, None, context(huge=1.0, all_reduce=f, part=slice(4 * r, 4 * r + 4))
        )
    )
    torch.testing.assert_close(torch.cat([part.weights for part in parts]), got.weights, rtol=1e-10, atol=0)
    name = "correction/truncated_sequences"
    assert float(parts[0].metrics[name]) == pytest.approx(float(got.metrics[name]))


def test_without_a_bound_extreme_weights_are_rejected_and_counted_not_clamped():
    for level, dropped in (("token", 1), ("sequence", 3)):
        given = context(torch.float32)
        got = TruncatedIS(level, upper=math.inf).correct(None, None, given)
        assert int(got.metrics["correction/extreme_tokens"]) == dropped
        assert int((~got.keep).sum()) == dropped
        assert got.weights.isfinite().all()
        assert float(got.weights.max()) <= math.exp(20)
    quiet = TruncatedIS(upper=math.inf).correct(None, None, context(huge=0.0))
    assert int(quiet.metrics["correction/extreme_tokens"]) == 0
    assert quiet.keep.all()
