"""What the corrections share, against loops over the sequences in Python."""

import math

import pytest
import torch

from lit_qrl.loop.weighting import DEFAULT_UPPER, EXTREME, rejected, weighted
from tests.callbacks.corrections import context
from tests.functional.helpers import Ranks, listed, spread_out

BANDS = [(0.0, 2.0), (0.5, 1.5)]


def ratios_of(level, sequences):
    """The ratio of every token, as its level has it."""
    return [
        {
            "token": [math.exp(d) for d in row],
            "sequence": [math.exp(sum(row))] * len(row),
            "geometric": [math.exp(sum(row) / max(len(row), 1))] * len(row),
        }[level]
        for row in sequences
    ]


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("kind", ["truncated", "masked"])
def test_weights_and_their_share(kind, level, band):
    low, high = band
    given = context(huge=3.0)
    got = weighted(kind, level, low, high, given)
    ratios = ratios_of(level, listed(given.log_ratio, given.mask))
    weigh = {
        "truncated": lambda r: min(max(r, low), high),
        "masked": lambda r: r if low <= r <= high else 0.0,
    }[kind]
    expected = spread_out([[weigh(r) for r in row] for row in ratios], given.mask)
    torch.testing.assert_close(got.weights[given.mask], expected[given.mask])
    units = [r for row in ratios for r in row] if level == "token" else [row[0] for row in ratios if row]
    name = f"correction/{kind}_{'token' if level == 'token' else 'sequence'}s"
    assert float(got.metrics[name]) == pytest.approx(sum(weigh(r) != r for r in units) / len(units))
    assert set(got.metrics) == {name}
    assert got.keep is None


def test_only_weights_without_any_bound_may_be_extreme():
    given = context()  # single log-ratios of 30
    assert weighted("truncated", "token", 0.0, EXTREME, given).keep is None
    got = weighted("truncated", "token", 0.0, math.inf, given)
    beyond = [[d > 20 for d in row] for row in listed(given.log_ratio, given.mask)]
    assert int(got.metrics["correction/extreme_tokens"]) == sum(map(sum, beyond)) == 1
    expected = spread_out([[float(not hit) for hit in row] for row in beyond], given.mask)
    assert torch.equal(got.keep, expected.bool())


@pytest.mark.parametrize(
    ("rule", "options", "dropped"),
    [
        ("ratio", {"lower": 0.8, "upper": 1.25}, lambda row, a: not math.log(0.8) <= mean(row) <= math.log(1.25)),
        ("veto", {"threshold": 0.6}, lambda row, a: min(row) < math.log(0.6)),
        ("off_policy", {"delta": 0.05}, lambda row, a: a < 0 and -mean(row) > 0.05),
    ],
)
def test_rejections_by_sequence(rule, options, dropped):
    given = context(spread=1.0, huge=2.0)
    sequences = listed(given.log_ratio, given.mask)
    gone = [bool(row) and dropped(row, float(a)) for row, a in zip(sequences, given.advantages, strict=True)]
    assert 0 < sum(gone) < sum(map(bool, sequences))
    got = rejected(rule, "gone", False, given, **options)
    assert got.weights is None
    assert (~got.keep & given.mask).any(dim=1).tolist() == gone
    assert float(got.metrics["correction/gone"]) == pytest.approx(sum(gone) / sum(map(bool, sequences)))
    counted = rejected(rule, "gone", True, given, **options)  # in the denominator: weights of 0
    assert counted.keep is None
    assert torch.equal(counted.weights, got.keep.to(given.log_ratio.dtype))


def test_rejections_by_token_count_tokens():
    given = context(spread=1.0, huge=2.0)
    got = rejected("ratio", "gone", False, given, lower=None, upper=0.1, divergence="k2", over="token")
    tokens = [d for row in listed(given.log_ratio, given.mask) for d in row]
    assert float(got.metrics["correction/gone"]) == pytest.approx(sum(d * d > 0.2 for d in tokens) / len(tokens))


def mean(row):
    return sum(row) / len(row)


def test_shares_are_global_over_ranks():
    whole = weighted("truncated", "sequence", 0.0, 1.2, context(huge=1.0))
    parts = Ranks(2).run(
        lambda r, f: weighted(
            "truncated", "sequence", 0.0, 1.2, context(huge=1.0, all_reduce=f, part=slice(4 * r, 4 * r + 4))
        )
    )
    name = "correction/truncated_sequences"
    assert [float(part.metrics[name]) for part in parts] == [pytest.approx(float(whole.metrics[name]))] * 2


def test_default_bounds_hold_one():
    assert set(DEFAULT_UPPER) == {"token", "sequence", "geometric"}
    assert min(DEFAULT_UPPER.values()) > 1
