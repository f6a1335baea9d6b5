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
