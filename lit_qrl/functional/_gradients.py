"""Gradients of weights that the product adds to what is there already.

    G ← G + gᵀ x

A product and a sum of their own write and read the gradient three times more, once for each micro-batch, and round it
twice.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def weight_gradients(weights: Sequence[Tensor], grad: Tensor, rows: Tensor) -> list[Tensor | None]:
    """Return the gradients of weights that lie one below another, None for each where they were added to those there.

    Args:
        weights: parameters "o i" each.
        grad: "m Σo", of the output.
        rows: "m i", the input.
    """
    there = _there(weights)
    # on a CPU the bits stay those of a product and a sum
    if there is None or there.device.type != "cuda" or not there.dtype == grad.dtype == rows.dtype:
        return added(weights, grad.t() @ rows)
    there.addmm_(grad.t(), rows)
    return [None] * len(weights)


def added(parameters: Sequence[Tensor | None], made: Tensor) -> list[Tensor | None]:
    """Return the gradients of parameters, or None for each where they were added to those there, all at once.

    Args:
        parameters: that lie one behind another; None where there is none at all.
        made: their gradients, one behind another along the first dimension.
    """
    held = [parameter for parameter in parameters if parameter is not None]
    there = _there(held) if held else None
    if there is not None:
        there.add_(made)
    if there is not None or not held:
        return [None] * len(parameters)
    parts = [made] if len(held) == 1 else made.split([len(parameter) for parameter in held])
    return [part.to(parameter.dtype) for part, parameter in zip(parts, held, strict=True)]


def _there(parameters: Sequence[Tensor]) -> Tensor | None:
    """Return the gradients that parameters have as one tensor, if they lie so and nobody waits for new ones."""
    if not all(parameter.is_leaf for parameter in parameters):  # as slices of a stack of experts
        return None
    grads = [parameter.grad for parameter in parameters]
    if not all(_alone(*pair) for pair in zip(parameters, grads, strict=True)) or _shared():
        return None
    held: list[Any] = list(grads)
    first = held[0]
    memory, place = first.untyped_storage().data_ptr(), first.storage_offset()
    for grad in held:
        if grad.untyped_storage().data_ptr() != memory or grad.storage_offset() != place:
            return None
        place += grad.numel()
    return first if len(held) == 1 else first.as_strided((sum(map(len, held)), *first.shape[1:]), first.stride())


def _alone(parameter: Any, grad: Tensor | None) -> bool:
    if grad is None or type(grad) is not Tensor or isinstance(parameter, DTensor):
        return False
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return False
    return grad.is_contiguous() and (grad.dtype, grad.device) == (parameter.dtype, parameter.device)


def _shared() -> bool:
    """Return whether processes may wait for each other's gradients."""
    return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
