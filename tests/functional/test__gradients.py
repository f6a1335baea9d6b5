import pytest
import torch
from torch import nn

from lit_qrl.functional import _gradients as gradients
from lit_qrl.functional._gradients import added, weight_gradients


def parameters(*sizes, inputs=3):
    return [nn.Parameter(torch.zeros(size, inputs)) for size in sizes], [nn.Parameter(torch.zeros(s)) for s in sizes]


def backward(weights, biases, grad, rows):
    """What autograd does with the gradients of a function."""
    found = weight_gradients(weights, grad, rows), added(biases, grad.sum(0))
    for parameter, made in zip([*weights, *biases], [*found[0], *found[1]], strict=True):
        if made is not None:
            parameter.grad = made if parameter.grad is None else parameter.grad + made
    return [one is None for part in found for one in part]


@pytest.mark.parametrize("sizes", [(4,), (4, 2, 1)])
def test_gradients_are_the_sums_of_the_products(sizes):
    torch.manual_seed(0)
    weights, biases = parameters(*sizes)
    total, counted = torch.zeros(sum(sizes), 3), torch.zeros(sum(sizes))
    for number in range(3):
        grad, rows = torch.randn(5, sum(sizes)), torch.randn(5, 3)
        alone = backward(weights, biases, grad, rows)
        assert alone == [number > 0] * (2 * len(sizes))
        total, counted = total + grad.t() @ rows, counted + grad.sum(0)
        torch.testing.assert_close(torch.cat([one.grad for one in weights]), total)
        torch.testing.assert_close(torch.cat([one.grad for one in biases]), counted)
    assert added([None, None], grad.sum(0)) == [None, None]


@pytest.mark.parametrize("case", ["hook", "after", "dtype", "apart", "processes"])
def test_gradients_that_somebody_waits_for_or_that_lie_elsewhere_are_returned(case, monkeypatch):
    weights, biases = parameters(2, 2)
    grad, rows = torch.randn(5, 4), torch.randn(5, 3)
    backward(weights, biases, grad, rows)
    assert weight_gradients(weights, grad, rows) == [None, None]
    if case == "hook":
        weights[0].register_hook(lambda grad: None)
    elif case == "after":
        weights[1].register_post_accumulate_grad_hook(lambda parameter: None)
    elif case == "dtype":
        weights[0] = nn.Parameter(weights[0].detach().double())
        weights[0].grad = torch.zeros(2, 3, dtype=torch.float64)
    elif case == "apart":
        weights[0].grad = weights[0].grad.clone()
    else:
        monkeypatch.setattr(gradients.torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(gradients.torch.distributed, "get_world_size", lambda: 2)
    before = [one.grad.clone() for one in weights]
    made = weight_gradients(weights, grad, rows)
    torch.testing.assert_close(torch.cat(made).float(), grad.t() @ rows)
    assert all(torch.equal(one.grad, held) for one, held in zip(weights, before, strict=True))


def test_products_in_16_bits_are_added_to_gradients_in_32():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(4, 3))
    grad, rows = torch.randn(5, 4).bfloat16(), torch.randn(5, 3).bfloat16()
    (first,) = weight_gradients([weight], grad, rows)
    assert first.dtype == torch.float32
    weight.grad = first
    assert weight_gradients([weight], grad, rows) == [None]
    assert torch.equal(weight.grad, 2 * (grad.t() @ rows).float())
