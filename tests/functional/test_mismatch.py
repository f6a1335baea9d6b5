import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_qrl.functional.mismatch import k3_divergence, log_quantile, mismatch_metrics
from tests.default_dtype import bf16_default
from tests.functional.helpers import DTYPES, RTOL, listed, on_ranks, rows

RESOLUTION = 10 ** (1 / 64)


def reference(learner, sampler):
    """Every metric from lists of log-probs, one list per sequence."""
    pairs = [
        [(a, b) for a, b in zip(x, y, strict=True) if math.isfinite(a - b)]
        for x, y in zip(learner, sampler, strict=True)
    ]
    d = [[a - b for a, b in row] for row in pairs]
    flat = [x for row in d for x in row]
    w = [math.exp(x) for x in flat]
    some = [i for i, row in enumerate(d) if row]

    def mean(values):
        return sum(values) / len(values)

    return {
        "kl_k1": mean([-x for x in flat]),
        "kl_k3": mean([math.expm1(x) - x for x in flat]),
        "abs_log_ratio": mean([abs(x) for x in flat]),
        "abs_prob_diff": mean([abs(math.exp(a) - math.exp(b)) for row in pairs for a, b in row]),
        "ess_ratio": sum(w) ** 2 / (len(w) * sum(x * x for x in w)),
        "chi2_token": mean([x * x for x in w]) - 1,
        "chi2_sequence": mean([math.exp(2 * sum(d[i])) for i in some]) - 1,
        "tv": mean([abs(x - 1) for x in w]) / 2,
        "weight_cv": statistics.stdev(w) / mean(w),
        "ppl_ratio": mean([math.exp(mean([b for _, b in pairs[i]]) - mean([a for a, _ in pairs[i]])) for i in some]),
        "learner_ppl": mean([math.exp(-mean([a for a, _ in pairs[i]])) for i in some]),
        "sampler_ppl": mean([math.exp(-mean([b for _, b in pairs[i]])) for i in some]),
        "ratio_max": max(w),
        "ratio_min": min(w),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("huge", [0.0, 30.0])
def test_equals_the_loop(dtype, huge):
    learner, sampler, mask, _ = rows(dtype, huge=huge)
    got = on_ranks(mismatch_metrics, learner, sampler, mask)
    wanted = reference(listed(learner, mask), listed(sampler, mask))
    for name, value in wanted.items():
        assert float(got[name]) == pytest.approx(value, rel=RTOL[dtype], abs=1e-12), name
    ordered = sorted(abs(float(x)) for x in (learner - sampler)[mask])
    rank = math.ceil(0.99 * len(ordered)) - 1
    assert ordered[rank] / 1.0001 <= float(got["log_ratio_p99"]) <= ordered[rank] * RESOLUTION * 1.0001
    assert int(got["nonfinite"]) == 0
    assert set(got) == {*wanted, "log_ratio_p99", "nonfinite"}


def test_nonfinite_tokens_are_counted_and_left_out():
    learner, sampler, mask, _ = rows(huge=0.0)
    clean = mismatch_metrics(learner, sampler, mask)
    learner = torch.cat([learner, torch.tensor([[-1.0, math.nan, -math.inf, -1.0, -1.0, -1.0]], dtype=learner.dtype)])
    sampler = torch.cat([sampler, torch.tensor([[-1.1, -1.0, -1.0, -math.inf, -1.0, -1.0]], dtype=sampler.dtype)])
    mask = torch.cat([mask, torch.tensor([[True, True, True, True, False, False]])])
    got = mismatch_metrics(learner, sampler, mask)
    wanted = reference(listed(learner, mask), listed(sampler, mask))
    assert int(got["nonfinite"]) == 3
    for name, value in wanted.items():
        assert float(got[name]) == pytest.approx(value, rel=1e-9), name
    assert float(got["kl_k1"]) != float(clean["kl_k1"])


def test_equal_policies():
    _, sampler, mask, _ = rows(torch.float32)
    got = mismatch_metrics(sampler, sampler, mask)
    zeros = ["kl_k1", "kl_k3", "abs_log_ratio", "abs_prob_diff", "chi2_token", "chi2_sequence", "tv", "weight_cv"]
    assert all(float(got[name]) == 0 for name in [*zeros, "log_ratio_p99", "nonfinite"])
    assert all(float(got[name]) == 1 for name in ["ess_ratio", "ppl_ratio", "ratio_max", "ratio_min"])


def test_an_empty_batch_has_no_mismatch():
    got = mismatch_metrics(torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool))
    assert all(value.isfinite() for value in got.values())
    assert float(got["ess_ratio"]) == 1


def test_what_fp32_cannot_hold_is_infinite_and_nothing_else_is():
    learner, sampler = torch.zeros(2, 3), torch.full((2, 3), -30.0)
    got = mismatch_metrics(learner, sampler, torch.ones(2, 3, dtype=torch.bool))
    assert math.isinf(float(got["chi2_sequence"]))
    assert all(value.isfinite() for name, value in got.items() if name != "chi2_sequence")


@pytest.mark.parametrize("dtype", DTYPES)
def test_k3_keeps_its_digits(dtype):
    d = torch.tensor([-30.0, -1.0, -1e-2, -1e-3, -1e-6, 0.0, 1e-7, 1e-4, 9e-3, 1.1e-2, 3.0, 30.0], dtype=dtype)
    series = []
    for x in d.tolist():
        term, total = 1.0, 0.0
        for k in range(1, 200):
            term *= x / k
            total += term if k > 1 else 0.0
        # The alternating series loses its digits for large negative arguments, where the plain formula has them all.
        series.append(math.exp(x) - 1 - x if x < -0.5 else total)
    wanted = torch.tensor(series, dtype=torch.float64)
    # The fp64 subtraction leaves eight digits of the smallest one.
    rtol = 2e-8 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(k3_divergence(d).double(), wanted, rtol=rtol, atol=0)


@given(values=st.lists(st.floats(0, 90), min_size=1, max_size=40), q=st.sampled_from([0.5, 0.9, 0.99]))
@settings(max_examples=100, deadline=None)
def test_quantile_is_within_one_bin(values, q):
    got = float(log_quantile(torch.tensor(values, dtype=torch.float64), torch.ones(len(values)).bool(), q))
    exact = sorted(values)[math.ceil(q * len(values)) - 1]
    if exact <= 1e-7:
        assert got <= 1e-7 * 1.001
    else:
        assert exact * 0.999 <= got <= exact * RESOLUTION * 1.001


def test_quantiles_do_not_depend_on_the_default_dtype():
    values = torch.linspace(1e-4, 1.0, 4000).view(4, 1000)
    expected = log_quantile(values, values > 0, 0.99)
    with bf16_default():
        found = log_quantile(values, values > 0, 0.99)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
