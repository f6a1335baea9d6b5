import math

import pytest
import torch

from lit_qrl.errors import ConfigError
from lit_qrl.functional.penalty import kl_penalty
from tests.functional.helpers import DTYPES, RTOL

FORMULAS = {
    "k1": (lambda p, q, o: p - q, lambda p, q, o: 1.0),
    "k2": (lambda p, q, o: (p - q) ** 2 / 2, lambda p, q, o: p - q),
    "k3": (lambda p, q, o: math.exp(q - p) - 1 - (q - p), lambda p, q, o: 1 - math.exp(q - p)),
    "k3+": (
        lambda p, q, o: math.exp(p - o) * (math.exp(q - p) - 1 - (q - p)),
        lambda p, q, o: math.exp(p - o) * (p - q),
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMULAS)
def test_value_and_gradient_equal_the_loop(name, dtype):
    value, slope = FORMULAS[name]
    learner = torch.tensor([[-1.0, -2.0, -31.0], [-0.5, -0.25, -1.5]], dtype=dtype, requires_grad=True)
    reference = torch.tensor([[-1.5, -2.0, -1.0], [-0.501, -0.75, -1.25]], dtype=dtype)
    old = torch.tensor([[-0.9, -2.5, -30.0], [-0.5, -0.5, -1.0]], dtype=dtype)
    got = kl_penalty(learner, reference, name, old)
    got.sum().backward()
    triples = list(zip(*(x.flatten().tolist() for x in (learner, reference, old)), strict=True))
    wanted = torch.tensor([value(*triple) for triple in triples], dtype=torch.float64)
    gradient = torch.tensor([slope(*triple) for triple in triples], dtype=torch.float64)
    torch.testing.assert_close(got.detach().double().flatten(), wanted, rtol=RTOL[dtype], atol=1e-12)
    torch.testing.assert_close(learner.grad.double().flatten(), gradient, rtol=RTOL[dtype], atol=1e-12)


def softmax_kl_gradient(logits, reference):
    """Return the KL of two categoricals and its gradient in the first's logits, p_i (ℓ_i − KL), by loops."""
    total, other = (sum(map(math.exp, values)) for values in (logits, reference))
    p, q = [math.exp(x) / total for x in logits], [math.exp(x) / other for x in reference]
    kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    return kl, [a * (math.log(a / b) - kl) for a, b in zip(p, q, strict=True)]


LOGITS, REFERENCE, OLD = [0.3, -1.2, 0.9, 2.0, -0.4], [1.0, 0.2, -1.5, 0.4, 0.0], [0.5, -0.7, 0.2, 1.1, -1.0]


def enumerated(estimator, old):
    """Return mean and gradient of an estimate over every token of a categorical, as often as `old` draws it."""
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    learner = logits.log_softmax(0)[None]
    reference, sampler = (torch.tensor(x, dtype=torch.float64).log_softmax(0)[None] for x in (REFERENCE, old))
    mean = (sampler.exp() * kl_penalty(learner, reference, estimator, sampler)).sum()
    mean.backward()
    return float(mean.detach()), logits.grad


def error(gradient, exact):
    exact = torch.tensor(exact, dtype=torch.float64)
    return float((gradient - exact).norm() / exact.norm())


def test_by_enumeration_the_corrected_k3_alone_has_value_and_gradient_of_the_kl_off_policy_too():
    kl, exact = softmax_kl_gradient(LOGITS, REFERENCE)
    for old in (LOGITS, OLD):
        value, gradient = enumerated("k3+", old)
        assert value == pytest.approx(kl, rel=1e-12)
        assert error(gradient, exact) < 1e-12
    on_policy = {estimator: error(enumerated(estimator, LOGITS)[1], exact) for estimator in ("k1", "k2", "k3")}
    assert on_policy["k1"] == pytest.approx(1.0)  # a gradient of mean zero
    assert on_policy["k2"] < 1e-12
    assert on_policy["k3"] > 0.2  # that of KL(reference‖learner)
    for estimator in ("k1", "k3"):
        assert enumerated(estimator, LOGITS)[0] == pytest.approx(kl, rel=1e-12)
    assert error(enumerated("k2", OLD)[1], exact) > 0.1


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3+"])
def test_clamps_bound_input_and_output_and_end_the_gradient(estimator):
    learner = torch.tensor([[-1.0, -31.0, -5.0]], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([[-1.5, -1.0, -1.0]], dtype=torch.float64)
    plain = kl_penalty(learner, reference, estimator)
    inside = kl_penalty(learner, reference, estimator, input_clamp=20.0)
    outside = kl_penalty(learner, reference, estimator, input_clamp=20.0, output_clamp=3.0)
    bound = {"k1": -20.0, "k2": 200.0, "k3": math.exp(20) - 21, "k3+": math.exp(20) - 21}[estimator]
    assert inside.tolist()[0] == pytest.approx([plain[0, 0].item(), bound, plain[0, 2].item()])
    assert outside.tolist()[0] == pytest.approx([min(max(x, -3.0), 3.0) for x in inside.tolist()[0]])
    for values, moving in ((plain, [1, 1, 1]), (inside, [1, 0, 1]), (outside, [1, 0, 0])):
        (gradient,) = torch.autograd.grad(values.sum(), learner)
        assert (gradient[0] != 0).int().tolist() == moving


def test_unknown_estimators_are_refused():
    with pytest.raises(Exception, match="k4"):
        kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), "k4")
    with pytest.raises(ConfigError, match="input_clamp"):
        kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), input_clamp=-1.0)
