import math
from functools import partial

import pytest
import torch

from lit_qrl.errors import ConfigError
from lit_qrl.functional import objective as F
from lit_qrl.functional.importance import truncated_share
from lit_qrl.functional.reduction import reduce
from tests.functional.helpers import DTYPES, RTOL, listed, log_ratios, no_host_sync, rows, spread_out


def clipped(a, r, low, high):
    """Return value and derivative in r of min(r·a, clip(r)·a)."""
    edge = min(max(r, 1 - low), 1 + high)
    return (r * a, a) if r * a <= edge * a else (edge * a, 0.0)


def token_level(rule):
    """Turn a rule (a, r) -> (gain, d gain / d r) into losses and gradients of one sequence."""

    def sequence(log_r, a, w, c, *_):
        loss, gradient = [], []
        for x, weight, factor in zip(log_r, w, c, strict=True):
            gain, slope = rule(a, math.exp(x))
            loss.append(-weight * gain)
            gradient.append(-factor * weight * slope * math.exp(x))
        return loss, gradient

    return sequence


def sequence_level(rule):
    """The same with the geometric mean as the ratio, each token's derivative its own; the rule also gets mean d."""

    def sequence(log_r, a, w, c, d, _):
        n = len(log_r)
        if not n:
            return [], []
        s = math.exp(sum(log_r) / n)
        gain, slope = rule(a, s, sum(d) / n)
        loss = [-weight * gain for weight in w]
        return loss, [-factor * weight * slope * s for factor, weight in zip(c, w, strict=True)]

    return sequence


def dual(a, r):
    gain, slope = clipped(a, r, 0.2, 0.2)
    return (3.0 * a, 0.0) if a < 0 and gain < 3.0 * a else (gain, slope)


def soft(a, r):
    tau = 1.0 if a > 0 else 1.05
    z = tau * (r - 1)
    p = 1 / (1 + math.exp(-z)) if z > -700 else 0.0
    # 4 p (1 − p) a, with 1 − p taken from its own formula where it vanishes.
    q = 1 / (1 + math.exp(z)) if z < 700 else 0.0
    return 4 / tau * p * a, 4 * p * q * a


def adaptive(log_r, a, w, c, d, _):
    """QuRL's edge (1 + ε)/r of each token, r = min(ρ, C)/ρ with C = 2."""
    edges = [1.2 * math.exp(gap) / min(math.exp(gap), 2.0) - 1 for gap in d]
    found = [clipped(a, math.exp(x), 0.2, edge) for x, edge in zip(log_r, edges, strict=True)]
    gradient = [-f * weight * g[1] * math.exp(x) for x, weight, f, g in zip(log_r, w, c, found, strict=True)]
    return [-weight * g[0] for weight, g in zip(w, found, strict=True)], gradient


def capped(log_r, a, w, c, _, logprobs):
    """CISPO: the clipped ratio is a weight of the log-prob, without a gradient of its own."""
    ratios = [min(max(math.exp(x), 0.9), 1.3) for x in log_r]
    loss = [-weight * r * a * logprob for weight, r, logprob in zip(w, ratios, logprobs, strict=True)]
    return loss, [-factor * weight * r * a for factor, weight, r in zip(c, w, ratios, strict=True)]


def banded(a, s, d_mean):
    w = math.exp(min(max(d_mean, -math.log(2.0)), math.log(2.0)))
    low, high = (1 - 0.03, 1 + 0.07) if a < 0 else (0.0, 1 + 0.04)
    return w * min(max(s, low), high) * a, w * a * (low <= s <= high)


def weighed_tbpo(learner, old, advantages, mask, weights, mismatch):
    terms = F.tbpo(learner, old, advantages, mask, mismatch, 0.04, 0.03, 0.07, 2.0)
    terms.loss = terms.loss * weights
    return terms


CASES = {
    "grpo": (
        lambda lp, old, a, m, w, d: F.clipped_surrogate(lp, old, a, m, w),
        token_level(lambda a, r: clipped(a, r, 0.2, 0.2)),
    ),
    "dapo": (
        lambda lp, old, a, m, w, d: F.clipped_surrogate(lp, old, a, m, w, 0.2, 0.28),
        token_level(lambda a, r: clipped(a, r, 0.2, 0.28)),
    ),
    "adaptive": (
        lambda lp, old, a, m, w, d: F.clipped_surrogate(lp, old, a, m, w, share=truncated_share(d, m, 2.0)),
        adaptive,
    ),
    "dual": (lambda lp, old, a, m, w, d: F.clipped_surrogate(lp, old, a, m, w, dual_clip=3.0), token_level(dual)),
    "positive": (
        lambda lp, old, a, m, w, d: F.positive_surrogate(lp, old, a, m, w),
        token_level(lambda a, r: clipped(a, r, 0.2, 0.2) if a > 0 else (0.0, 0.0)),
    ),
    "gspo": (
        lambda lp, old, a, m, w, d: F.gspo(lp, old, a, m, w, 0.05, 0.06),
        sequence_level(lambda a, s, d: clipped(a, s, 0.05, 0.06)),
    ),
    "sapo": (lambda lp, old, a, m, w, d: F.sapo(lp, old, a, m, w), token_level(soft)),
    "tbpo": (weighed_tbpo, sequence_level(banded)),
    "cispo": (lambda lp, old, a, m, w, d: F.cispo(lp, old, a, m, w, 0.1, 0.3), capped),
}


def problem(dtype, seed=0):
    learner, old, mask, advantages = rows(dtype, huge=30.0, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    weights = torch.rand(mask.shape, generator=generator, dtype=torch.float64).to(dtype)
    factors = torch.randn(mask.shape, generator=generator, dtype=torch.float64).to(dtype)
    mismatch = torch.randn(mask.shape, generator=generator, dtype=torch.float64).to(dtype)
    return learner.requires_grad_(), old, mask, advantages, weights, factors, mismatch


def expect(sequence, learner, old, mask, advantages, weights, factors, mismatch):
    log_r = log_ratios(learner, old, mask)
    per_token = (listed(x, mask) for x in (weights, factors, mismatch, learner.detach()))
    parts = [sequence(*of_row) for of_row in zip(log_r, advantages.tolist(), *per_token, strict=True)]
    return tuple(spread_out([part[i] for part in parts], mask, fill=0.0) for i in (0, 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_equal_the_loop(name, dtype):
    function, sequence = CASES[name]
    learner, old, mask, advantages, weights, factors, mismatch = problem(dtype)
    with no_host_sync():
        terms = function(learner, old, advantages, mask, weights, mismatch)
        (terms.loss * factors).sum().backward()
    loss, gradient = expect(sequence, learner, old, mask, advantages, weights, factors, mismatch)
    torch.testing.assert_close(terms.loss.detach().double(), loss, rtol=RTOL[dtype], atol=1e-12)
    torch.testing.assert_close(learner.grad.double(), gradient, rtol=RTOL[dtype], atol=1e-12)
    assert terms.loss.dtype == dtype


def test_metrics_are_pairs_of_sum_and_count():
    learner, old, mask, advantages, *_ = problem(torch.float64)
    metrics = F.clipped_surrogate(learner, old, advantages, mask, clip_low=0.1, clip_high=0.3).metrics
    log_r = log_ratios(learner, old, mask)
    flat = [(math.exp(x), a) for row, a in zip(log_r, advantages.tolist(), strict=True) for x in row]
    wanted = {
        "update/kl": (sum(r - 1 - math.log(r) for r, _ in flat), len(flat)),
        "update/ratio": (sum(r for r, _ in flat), len(flat)),
        "update/clip_fraction_low_positive": (sum(r < 0.9 and a > 0 for r, a in flat), sum(a > 0 for _, a in flat)),
        "update/clip_fraction_high_positive": (sum(r > 1.3 and a > 0 for r, a in flat), sum(a > 0 for _, a in flat)),
        "update/clip_fraction_low_negative": (sum(r < 0.9 and a < 0 for r, a in flat), sum(a < 0 for _, a in flat)),
        "update/clip_fraction_high_negative": (sum(r > 1.3 and a < 0 for r, a in flat), sum(a < 0 for _, a in flat)),
    }
    assert set(metrics) == set(wanted)
    for name, pair in wanted.items():
        assert metrics[name].tolist() == pytest.approx(pair), name
        assert not metrics[name].requires_grad
    assert all(pair[0] > 0 for pair in wanted.values())


def test_a_wholly_rejected_batch_has_loss_and_gradient_zero():
    learner, old, mask, advantages, weights, _, mismatch = problem(torch.float64)
    nothing = torch.zeros_like(mask)
    for function, _ in CASES.values():
        x = learner.detach().clone().requires_grad_()
        loss = function(x, old, advantages, nothing, weights, mismatch).loss
        for reduction in ("sequence", "token", "constant"):
            value = reduce(loss, nothing, reduction, 6)
            value.backward(retain_graph=True)
            assert float(value.detach()) == 0
        assert torch.equal(x.grad, torch.zeros_like(x.grad))


@pytest.mark.parametrize(
    "call",
    [
        lambda x, a, m: F.clipped_surrogate(x, x, a, m, clip_low=-0.1),
        lambda x, a, m: F.clipped_surrogate(x, x, a, m, clip_low=1.1),
        lambda x, a, m: F.clipped_surrogate(x, x, a, m, dual_clip=1.0),
        lambda x, a, m: F.gspo(x, x, a, m, clip_high=-1e-4),
        lambda x, a, m: F.tbpo(x, x, a, m, x, neg_low=2.0),
        lambda x, a, m: F.tbpo(x, x, a, m, x, mismatch_cap=1.0),
        lambda x, a, m: F.sapo(x, x, a, m, temperature_neg=0.0),
        lambda x, a, m: F.cispo(x, x, a, m, clip_high=-1.0),
    ],
)
def test_bad_parameters_are_refused(call):
    with pytest.raises(ConfigError, match=r"Expected: .* Given: .*"):
        call(torch.zeros(1, 1), torch.zeros(1), torch.ones(1, 1, dtype=torch.bool))


LEFT = {
    "grpo": (F.clipped_surrogate, 1.0),
    "dual clip": (partial(F.clipped_surrogate, dual_clip=3.0), -1.0),
    "positive": (F.positive_surrogate, -1.0),
    "gspo": (F.gspo, 1.0),
    "tbpo": (lambda *given: F.tbpo(*given, torch.zeros(1, 2)), -1.0),
    "sapo": (F.sapo, -1.0),
}


@pytest.mark.parametrize("name", LEFT)
@pytest.mark.parametrize("nats", [60.0, 120.0, 1000.0])
def test_beyond_its_bound_a_loss_has_no_gradient_however_large_the_ratio(name, nats):
    formula, sign = LEFT[name]
    logprobs = torch.full((1, 2), -1.0, requires_grad=True)
    terms = formula(logprobs, logprobs.detach() - nats, torch.tensor([sign]), torch.ones(1, 2, dtype=torch.bool))
    terms.loss.sum().backward()
    assert terms.loss.isfinite().all()
    assert terms.metrics["update/ratio"].isfinite().all()
    assert torch.equal(logprobs.grad, torch.zeros(1, 2))
