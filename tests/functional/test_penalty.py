import math

import pytest
import torch

from lit_qrl.functional.penalty import k1_penalty, k2_penalty, k3_penalty, kl_penalty
from tests.functional.helpers import DTYPES, RTOL

FORMULAS = {
    "k1": (lambda p, q: p - q, lambda p, q: 1.0),
    "k2": (lambda p, q: (p - q) ** 2 / 2, lambda p, q: p - q),
    "k3": (lambda p, q: math.exp(q - p) - 1 - (q - p), lambda p, q: 1 - math.exp(q - p)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMULAS)
def test_value_and_gradient_equal_the_loop(name, dtype):
    value, slope = FORMULAS[name]
    learner = torch.tensor([[-1.0, -2.0, -31.0], [-0.5, -0.25, -1.5]], dtype=dtype, requires_grad=True)
    reference = torch.tensor([[-1.5, -2.0, -1.0], [-0.5, -0.75, -1.25]], dtype=dtype)
    got = kl_penalty(learner, reference, name)
    got.sum().backward()
    pairs = list(zip(learner.flatten().tolist(), reference.flatten().tolist(), strict=True))
    wanted = torch.tensor([value(p, q) for p, q in pairs], dtype=torch.float64)
    gradient = torch.tensor([slope(p, q) for p, q in pairs], dtype=torch.float64)
    torch.testing.assert_close(got.detach().double().flatten(), wanted, rtol=RTOL[dtype], atol=1e-12)
    torch.testing.assert_close(learner.grad.double().flatten(), gradient, rtol=RTOL[dtype], atol=1e-12)


def test_all_estimate_the_divergence_under_the_learner():
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.3, 0.5]).double()
    divergence = float((p * (p / q).log()).sum())
    for estimate in (k1_penalty, k3_penalty):
        assert float((p * estimate(p.log()[None], q.log()[None])[0]).sum()) == pytest.approx(divergence)
    assert float((p * k2_penalty(p.log()[None], q.log()[None])[0]).sum()) == pytest.approx(divergence, rel=0.25)


def test_unknown_estimators_are_refused():
    with pytest.raises(Exception, match="k4"):
        kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), "k4")
