"""All experts of a layer in one product: rows sorted by expert, and a matrix for each, multiplied by one grouped GEMM.

It takes the place of `one_after_another` (`experts.py`), with as many kernels for 128 experts as for one, and without
the host's waiting for the number of rows of each. Where the device has no such GEMM, the loop stays.
"""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lit_qrl.network.experts import ExpertStack

log = logging.getLogger(__name__)

_ALIGNED = 8
"""Rows of bf16 numbers begin at multiples of 16 bytes."""


def can_group(stack: ExpertStack, x: Tensor) -> bool:
    """Return whether one grouped GEMM can multiply rows like `x` with the experts' matrices: in bf16, on a GPU."""
    on_device = x.device.type == "cuda" and x.dtype == torch.bfloat16
    fits = all(size % _ALIGNED == 0 for shape in stack.shapes.values() for size in shape)
    return on_device and fits and multiplies(x.device)


@lru_cache
def multiplies(device: torch.device) -> bool:
    """Return whether the device's grouped GEMM gives the three products of a pass and its gradients, by trying them.

    >>> multiplies(torch.device("meta"))
    False
    """
    counts = [3, 0, 5]
    with torch.no_grad(), torch.autocast(device.type, enabled=False) if device.type != "meta" else nullcontext():
        try:
            x, grad = torch.ones(8, 16, device=device).bfloat16(), torch.full((8, 32), 2.0, device=device).bfloat16()
            weight = torch.full((3, 32, 16), 0.5, device=device).bfloat16()
            ends = torch.tensor(counts, device=device).cumsum(0).to(torch.int32)
            made = torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)
            back = torch._grouped_mm(grad, weight, offs=ends)
            learned = torch._grouped_mm(grad.t(), x, offs=ends)[[0, 2]]
            wanted = 2.0 * torch.tensor([3.0, 5.0], device=device)[:, None, None]
            return bool((made == 8).all() and (back == 32).all() and (learned == wanted).all())
        except (RuntimeError, AttributeError, NotImplementedError) as error:
            log.warning("Experts are multiplied one after another: no grouped GEMM on %s (%s).", device, error)
            return False


def grouped_product(
    x: Tensor,
    ends: Tensor,
    operand: Callable[[], Tensor],
    weight: Tensor | None = None,
    backward: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Return the rows of `x` times the transposed matrix of their expert, "n out".

    The gradient of `x` is that of the output times `backward`, the gradient of `weight` that of x Wᵀ.

    Args:
        x: "n in", sorted by expert.
        ends: " experts", int32: where the rows of each end.
        operand: makes the matrices "experts out in"; they are not kept for the backward pass, but made again.
        weight: what is learned in their place, "experts out in", or None.
        backward: makes what the output's gradient is multiplied by; None takes `operand`.

    >>> x, ends = torch.arange(12.0).view(3, 4), torch.tensor([1, 3], dtype=torch.int32)
    >>> matrices = torch.stack([torch.eye(4), 2 * torch.eye(4)])
    >>> grouped_product(x, ends, lambda: matrices)[:, 1].tolist()
    [1.0, 10.0, 18.0]
    """
    return _Grouped.apply(x, weight, ends, operand, backward or operand)  # pyright: ignore[reportReturnType]


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, ends: Tensor, operand: Any, backward: Any) -> Tensor:
        ctx.save_for_backward(x if weight is not None else None, ends)
        ctx.backward_operand = backward
        return torch._grouped_mm(x, operand().transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, ends = ctx.saved_tensors
        (grad,) = (one.contiguous() for one in grads)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = torch._grouped_mm(grad, ctx.backward_operand(), offs=ends)
        if ctx.needs_input_grad[1]:
            grad_weight = torch._grouped_mm(grad.t(), x, offs=ends)
            empty = ends.diff(prepend=ends.new_zeros(1)) == 0  # of which a kernel may leave the memory as it was
            grad_weight = grad_weight.masked_fill(empty[:, None, None], 0.0)
        return grad_x, grad_weight, None, None, None
