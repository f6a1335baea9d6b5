import math

import pytest
import torch

from lit_qrl.callbacks.truncated import TruncatedIS
from lit_qrl.errors import ConfigError
from lit_qrl.functional import importance as F
from tests.callbacks.corrections import context
from tests.functional.helpers import Ranks, listed, no_host_sync


@pytest.mark.parametrize(
    "level, function, upper",
    [
        ("token", F.token_truncated, 2.0),
        ("sequence", F.sequence_truncated, 5.0),
        ("geometric", F.geometric_truncated, 2.0),
    ],
)
def test_default_bounds_of_each_level(level, function, upper):
    given = context()
    with no_host_sync():
        got = TruncatedIS(level).correct(None, None, given)
    assert torch.equal(got.weights, function(given.log_ratio, given.mask, upper, 0.0))
    assert got.keep is None
    ratios = {
        "token": [math.exp(x) for row in listed(given.log_ratio, given.mask) for x in row],
        "sequence": [math.exp(sum(row)) for row in listed(given.log_ratio, given.mask) if row],
        "geometric": [math.exp(sum(row) / len(row)) for row in listed(given.log_ratio, given.mask) if row],
    }[level]
    name = "correction/truncated_tokens" if level == "token" else "correction/truncated_sequences"
    assert float(got.metrics[name]) == pytest.approx(sum(r > upper for r in ratios) / len(ratios))
    assert float(got.metrics[name]) > 0


def test_lower_bound_and_its_reciprocal():
    given = context()
    got = TruncatedIS(upper=1.25, lower=None).correct(None, None, given)
    assert torch.equal(got.weights, F.token_truncated(given.log_ratio, given.mask, 1.25, 0.8))


def test_measured_bound_is_logged_and_global():
    given = context(huge=1.0)
    with no_host_sync():
        got = TruncatedIS("sequence", upper="auto").correct(None, None, given)
    upper = F.adaptive_upper(given.log_ratio, given.mask)
    assert torch.equal(got.metrics["correction/upper"], upper)
    assert torch.equal(got.weights, F.sequence_truncated(given.log_ratio, given.mask, upper))
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


def test_equal_policies_leave_every_weight_exactly_one():
    for options in (
        {},
        {"level": "sequence", "upper": "auto", "lower": None},
        {"level": "geometric"},
        {"upper": math.inf},
    ):
        got = TruncatedIS(**options).correct(None, None, context(torch.float32, equal=True))
        assert torch.equal(got.weights, torch.ones(8, 6))


@pytest.mark.parametrize(
    "options, word",
    [
        ({"upper": 0.5}, "upper >= 1"),
        ({"lower": 3.0}, "lower"),
        ({"lower": -0.5}, "lower"),
        ({"upper": "auto"}, "level: sequence"),
        ({"upper": "big", "level": "sequence"}, "number or auto"),
        ({"level": "sequence", "upper": "auto", "lower": 2.0}, "lower"),
        ({"level": "group"}, "level of TruncatedIS"),
    ],
)
def test_bad_input_is_refused_at_construction(options, word):
    with pytest.raises(ConfigError, match=word):
        TruncatedIS(**options)
