import math

import pytest
import torch

from lit_qrl.errors import ConfigError
from lit_qrl.functional import importance as F
from lit_qrl.functional.rejection import opsm_keep, ratio_keep, token_veto
from tests.functional.helpers import DTYPES, RTOL, Ranks, listed, log_ratios, no_host_sync, on_ranks, rows, spread_out

INF = math.inf


def clamp(x, low, high):
    return min(max(x, low), high)


def band(x, low, high):
    return x if low <= x <= high else 0.0


def mean(values):
    return sum(values) / len(values) if values else 0.0


# name: (function of (d, mask), reference of one row's list of d)
CASES = {
    "token_truncated": (lambda d, m: F.truncated_weights(d, m, 2.0), lambda r: [clamp(math.exp(x), 0, 2) for x in r]),
    "token_truncated_both": (
        lambda d, m: F.truncated_weights(d, m, 3.0, None),
        lambda r: [clamp(math.exp(x), 1 / 3, 3) for x in r],
    ),
    "token_untruncated": (lambda d, m: F.truncated_weights(d, m, INF), lambda r: [math.exp(x) for x in r]),
    "token_masked": (lambda d, m: F.masked_weights(d, m, 0.5, 2.0), lambda r: [band(math.exp(x), 0.5, 2) for x in r]),
    "token_masked_reciprocal": (
        lambda d, m: F.masked_weights(d, m, None, 1.25),
        lambda r: [band(math.exp(x), 0.8, 1.25) for x in r],
    ),
    "sequence_truncated": (
        lambda d, m: F.truncated_weights(d, m, 5.0, level="sequence"),
        lambda r: clamp(math.exp(sum(r)), 0, 5),
    ),
    "sequence_truncated_both": (
        lambda d, m: F.truncated_weights(d, m, 1.5, 0.9, level="sequence"),
        lambda r: clamp(math.exp(sum(r)), 0.9, 1.5),
    ),
    "sequence_masked": (
        lambda d, m: F.masked_weights(d, m, 0.0, 5.0, level="sequence"),
        lambda r: band(math.exp(sum(r)), 0, 5),
    ),
    "geometric_truncated": (
        lambda d, m: F.truncated_weights(d, m, 1.1, 0.95, level="geometric"),
        lambda r: clamp(math.exp(mean(r)), 0.95, 1.1),
    ),
    "geometric_masked": (
        lambda d, m: F.masked_weights(d, m, None, 1.2, level="geometric"),
        lambda r: band(math.exp(mean(r)), 1 / 1.2, 1.2),
    ),
    "geometric_keep": (lambda d, m: ratio_keep(d, m, 0.9, 1.1), lambda r: float(0.9 <= math.exp(mean(r)) <= 1.1)),
    "token_veto": (lambda d, m: token_veto(d, m), lambda r: float(all(math.exp(x) >= 1e-4 for x in r))),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_loop(name, dtype):
    function, reference = CASES[name]
    learner, sampler, mask, _ = rows(dtype)
    with no_host_sync():
        d = F.log_ratio(learner, sampler, mask)
        got = function(d, mask)
    wanted = spread_out([reference(row) for row in listed(d, mask)], mask)
    torch.testing.assert_close(got.double(), wanted, rtol=RTOL[dtype], atol=0)
    assert got.dtype == (torch.bool if got.dtype == torch.bool else dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_ratio_equals_the_loop_and_is_exactly_zero_in_the_padding(dtype):
    learner, sampler, mask, _ = rows(dtype)
    got = F.log_ratio(learner.clone().requires_grad_(), sampler, mask)
    wanted = spread_out(log_ratios(learner, sampler, mask), mask, fill=0.0)
    torch.testing.assert_close(got.double(), wanted, rtol=RTOL[dtype], atol=1e-6 if dtype == torch.float32 else 0)
    assert torch.equal(got[~mask], torch.zeros_like(got[~mask]))
    assert not got.requires_grad


def test_opsm_equals_the_loop():
    learner, sampler, mask, advantages = rows()
    d = F.log_ratio(learner - 0.2, sampler, mask)
    with no_host_sync():
        got = opsm_keep(d, mask, advantages, 0.05)
    wanted = [
        float(a >= 0 or mean([-x for x in r]) <= 0.05)
        for r, a in zip(listed(d, mask), advantages.tolist(), strict=True)
    ]
    torch.testing.assert_close(got.double(), spread_out(wanted, mask))
    assert 0 < sum(wanted) < len(wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_adaptive_upper_equals_the_loop(dtype):
    learner, sampler, mask, _ = rows(dtype)
    d = F.log_ratio(learner, sampler, mask)
    got = on_ranks(F.adaptive_upper, d, mask)
    second = [math.exp(sum(r)) ** 2 for r in listed(d, mask) if r]
    assert float(got) == pytest.approx(math.sqrt(2 * sum(second) / len(second)), rel=RTOL[dtype])


def test_adaptive_upper_of_large_ratios_of_an_empty_batch_and_as_a_bound():
    d, mask = torch.full((2, 1), 60.0), torch.ones(2, 1, dtype=torch.bool)
    assert float(F.adaptive_upper(d, mask)) == pytest.approx(math.sqrt(2) * math.exp(60), rel=1e-4)
    assert math.isinf(float(torch.exp(2 * d[0, 0])))
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    assert float(F.adaptive_upper(torch.zeros(2, 3), nothing)) == pytest.approx(math.sqrt(2))
    d, mask = torch.tensor([[3.0], [-3.0], [-3.0]]), torch.ones(3, 1, dtype=torch.bool)
    upper = F.adaptive_upper(d, mask)
    weights = F.truncated_weights(d, mask, upper, level="sequence")
    assert weights[:, 0].tolist() == pytest.approx([float(upper), math.exp(-3), math.exp(-3)])


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_normalized_equals_the_loop(level, dtype):
    learner, sampler, mask, _ = rows(dtype)
    weights = F.truncated_weights(F.log_ratio(learner, sampler, mask), mask, 2.0)
    with no_host_sync():
        got = F.batch_normalized(weights, mask, level)
    per_row = listed(weights, mask)
    if level == "token":
        average = mean([w for row in per_row for w in row])
    else:
        average = mean([mean(row) for row in per_row if row])
    wanted = spread_out([[w / average for w in row] for row in per_row], mask)
    torch.testing.assert_close(got.double(), wanted, rtol=RTOL[dtype], atol=0)


def test_batch_normalized_leaves_zeros_and_refuses_an_unknown_level():
    mask = torch.ones(2, 2, dtype=torch.bool)
    assert torch.equal(F.batch_normalized(torch.zeros(2, 2), mask), torch.zeros(2, 2))
    with pytest.raises(ValueError, match="token, sequence"):
        F.batch_normalized(torch.ones(2, 2), mask, "geometric")


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_batch_normalized_is_global_over_ranks(level):
    learner, sampler, mask, _ = rows(huge=2.0)
    weights = F.truncated_weights(F.log_ratio(learner, sampler, mask), mask, 2.0)
    halves = list(zip(weights.split(4), mask.split(4), strict=True))
    parts = Ranks(2).run(lambda r, f: F.batch_normalized(*halves[r], level, all_reduce=f))
    torch.testing.assert_close(torch.cat(parts), F.batch_normalized(weights, mask, level), rtol=1e-12, atol=0)


def test_equal_policies_give_weights_of_exactly_one():
    _, sampler, mask, advantages = rows(torch.float32)
    d = F.log_ratio(sampler, sampler, mask)
    for name, (function, _) in CASES.items():
        got = function(d, mask)
        assert torch.equal(got.float(), torch.ones(mask.shape)), name
    assert torch.equal(
        F.truncated_weights(d, mask, F.adaptive_upper(d, mask), None, level="sequence"), torch.ones(mask.shape)
    )
    assert torch.equal(F.masked_weights(d, mask, None, 1.0), torch.ones(mask.shape))  # the band holds its edges
    assert opsm_keep(d, mask, advantages, 1e-9).all()
    half = torch.zeros(mask.shape, dtype=torch.bfloat16)
    assert F.truncated_weights(half, mask, 2.0).dtype == F.log_ratio(half, half, mask).dtype == torch.float32
    for level in ("token", "sequence"):
        assert torch.equal(F.batch_normalized(torch.ones(mask.shape), mask, level), torch.ones(mask.shape))


@pytest.mark.parametrize(
    "call",
    [
        lambda d, m: F.truncated_weights(d, m, 0.5),
        lambda d, m: F.masked_weights(d, m, 3.0, 2.0),
        lambda d, m: F.masked_weights(d, m, -1.0, 2.0, level="sequence"),
        lambda d, m: ratio_keep(d, m, 1.001, 1.01),
        lambda d, m: ratio_keep(d, m, 0.5, 2.0, "k3"),
        lambda d, m: token_veto(d, m, 1.0),
        lambda d, m: opsm_keep(d, m, torch.zeros(1), 0.0),
    ],
)
def test_bad_bounds_are_refused_with_a_remedy(call):
    with pytest.raises(ConfigError, match=r"Expected: .* Given: .*"):
        call(torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool))
