import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_qrl.errors import ConfigError
from lit_qrl.functional.adaptive import AISGate, ais_gate, ais_oracle, ais_weights
from lit_qrl.functional.importance import log_ratio
from tests.functional.helpers import DTYPES, RTOL, listed, no_host_sync, on_ranks, rows, spread_out


def reference(d, advantages, clip=5.0, saturation=0.02, tolerance=1.2, sensitivity=1.0, eps=1e-6, level="token"):
    """AIS eqs. 12-17 from lists of per-token log-ratios, one list per sequence."""
    tokens = [x for row in d for x in row]
    if level == "token":
        pairs = [(x, a) for row, a in zip(d, advantages, strict=True) for x in row]
    else:
        pairs = [(sum(row), a) for row, a in zip(d, advantages, strict=True) if row]
    w = [min(math.exp(x), clip) for x, _ in pairs]
    cv = statistics.stdev(w) / statistics.mean(w)
    ess = 1 / (1 + cv**2)
    d_bar = sum(abs(x) for x in tokens) / len(tokens)
    a = [a for _, a in pairs]
    amplification = statistics.stdev([x * y for x, y in zip(w, a, strict=True)]) / (statistics.stdev(a) + eps)
    penalty = max(0.0, (amplification - tolerance) / tolerance)
    necessity = min(1.0, d_bar / saturation)
    alpha = min(max(math.sqrt(ess) - sensitivity * penalty, 0.0), 1.0) * necessity
    truncated = sum(math.exp(x) > clip for x, _ in pairs) / len(pairs)
    return AISGate(alpha, math.sqrt(ess), necessity, penalty, amplification, d_bar, ess, truncated)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"clip": 1.2, "saturation": 5.0, "tolerance": 0.5, "sensitivity": 0.3}])
def test_gate_equals_the_loop(dtype, level, options):
    learner, sampler, mask, advantages = rows(dtype)
    d = log_ratio(learner, sampler, mask)
    got = on_ranks(ais_gate, d, mask, advantages, level=level, **options)
    wanted = reference(listed(d, mask), advantages.tolist(), level=level, **options)
    for name, value in wanted._asdict().items():
        assert float(getattr(got, name)) == pytest.approx(value, rel=RTOL[dtype], abs=1e-12), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_equal_the_loop(dtype, level):
    learner, sampler, mask, _ = rows(dtype)
    d = log_ratio(learner, sampler, mask)
    with no_host_sync():
        got = ais_weights(d, mask, 0.3, 4.0, level=level)
    if level == "token":
        wanted = [[1 + 0.3 * (min(math.exp(x), 4.0) - 1) for x in row] for row in listed(d, mask)]
    else:
        wanted = [1 + 0.3 * (min(math.exp(sum(row)), 4.0) - 1) for row in listed(d, mask)]
    torch.testing.assert_close(got.double(), spread_out(wanted, mask), rtol=RTOL[dtype], atol=0)


def test_equal_policies_have_alpha_zero_and_weights_of_exactly_one():
    _, sampler, mask, advantages = rows(torch.float32)
    d = log_ratio(sampler, sampler, mask)
    for level in ("token", "sequence"):
        gate = ais_gate(d, mask, advantages, level=level)
        assert (float(gate.alpha), float(gate.necessity), float(gate.ess_ratio)) == (0.0, 0.0, 1.0)
        for alpha in (gate.alpha, 0.37, 1.0):
            assert torch.equal(ais_weights(d, mask, alpha, level=level), torch.ones(mask.shape))


def test_zero_advantages_carry_no_penalty_and_degenerate_batches_stay_finite():
    d = torch.full((2, 2), -200.0)
    for mask in (torch.ones(2, 2, dtype=torch.bool), torch.zeros(2, 2, dtype=torch.bool), torch.eye(2).bool()):
        gate = ais_gate(torch.where(mask, d, 0.0), mask, torch.zeros(2))
        assert torch.stack(gate).isfinite().all()
        assert float(gate.variance_penalty) == 0
        assert 0 < float(gate.ess_ratio) <= 1


@given(
    values=st.lists(st.lists(st.floats(-30, 30), min_size=3, max_size=3), min_size=1, max_size=5),
    lengths=st.lists(st.integers(0, 3), min_size=5, max_size=5),
    advantages=st.lists(st.floats(-5, 5), min_size=5, max_size=5),
    clip=st.floats(1, 20),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=100, deadline=None)
def test_gate_and_weights_keep_their_bounds(values, lengths, advantages, clip, dtype):
    mask = torch.arange(3) < torch.tensor(lengths[: len(values)])[:, None]
    d = torch.where(mask, torch.tensor(values, dtype=dtype), 0.0)
    gate = ais_gate(d, mask, torch.tensor(advantages[: len(values)], dtype=dtype), clip)
    assert torch.stack(gate).isfinite().all()
    assert 0 < float(gate.ess_ratio) <= 1
    assert 0 <= float(gate.alpha) <= 1
    weights = ais_weights(d, mask, gate.alpha, clip)
    rounding = 1 + 1e-6
    assert (weights >= 0).all()
    assert (weights <= (1 + gate.alpha * (clip - 1)) * rounding).all()


def test_bad_parameters_are_refused():
    with pytest.raises(ConfigError, match=r"eps > 0. Given: 0\.0"):
        ais_gate(torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool), torch.zeros(1), eps=0.0)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("seed", "inside"), [(0, False), (2, True)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_oracle_minimises_the_error_of_the_mixed_gradient(dtype, seed, inside, level):
    """Proposition 1: bias² + variance of (1 − α + α w̄) A, from lists in fp64, is smallest at the exact α*."""
    learner, sampler, mask, advantages = rows(dtype, huge=0.0, spread=1.0, seed=seed)
    d = log_ratio(learner, sampler, mask)
    per_row = listed(d, mask) if level == "token" else [[sum(row)] for row in listed(d, mask) if row]
    kept = advantages.double().tolist() if level == "token" else advantages.double()[mask.any(dim=1)].tolist()
    pairs = [(math.exp(x), a) for row, a in zip(per_row, kept, strict=True) for x in row]
    bias2 = (statistics.mean(a for _, a in pairs) - statistics.mean(w * a for w, a in pairs)) ** 2

    def error(alpha):  # with b1 = 0, as the proposition has it
        return (1 - alpha) ** 2 * bias2 + statistics.pvariance([(1 - alpha + alpha * w) * a for w, a in pairs])

    got = ais_oracle(d, mask, advantages, 1e9, level=level)
    steps = [error(step / 500) for step in range(501)]  # of [0, 1]
    assert float(got.exact) == pytest.approx(steps.index(min(steps)) / 500, abs=2e-3)
    assert (0 < float(got.exact) < 1) == inside
    variance = statistics.pvariance([w * a for w, a in pairs])
    assert float(got.simplified) == pytest.approx(bias2 / (bias2 + variance), rel=1e-3)
    assert ais_oracle(0 * d, mask, advantages) == (0.0, 0.0)
