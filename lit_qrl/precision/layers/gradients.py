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
    if there is not None:
        there.addmm_(grad.t(), rows)
        return [None] * len(weights)
    made = grad.t() @ rows
    return [made] if len(weights) == 1 else list(made.split([len(weight) for weight in weights]))


def bias_gradients(biases: Sequence[Tensor | None], grad: Tensor) -> list[Tensor | None]:
    """Return the gradients of biases that lie one behind another, or None as `weight_gradients` does.

    Args:
        biases: parameters " o" each; None for all of them.
        grad: "m Σo", of the output.
    """
    held = [bias for bias in biases if bias is not None]
    if not held:
        return [None] * len(biases)
    there, made = _there(held), grad.sum(dim=0)
    if there is not None:
        there.add_(made)
        return [None] * len(biases)
    return [made] if len(held) == 1 else list(made.split([len(bias) for bias in held]))


def _there(parameters: Sequence[Tensor]) -> Tensor | None:
    """Return the gradients that parameters have as one tensor, if they lie so and nobody waits for new ones."""
    grads = [parameter.grad for parameter in parameters]
    if not all(_alone(*pair) for pair in zip(parameters, grads, strict=True)) or _shared():
        return None
    first: Any = grads[0]
    memory, place = first.untyped_storage().data_ptr(), first.storage_offset()
    for grad in grads:
        assert grad is not None
        if grad.untyped_storage().data_ptr() != memory or grad.storage_offset() != place:
            return None
        place += grad.numel()
    return first if len(grads) == 1 else first.as_strided((sum(map(len, grads)), *first.shape[1:]), first.stride())


def _alone(parameter: Any, grad: Tensor | None) -> bool:
    if grad is None or type(grad) is not Tensor or isinstance(parameter, DTensor) or not parameter.is_leaf:
        return False
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return False
    return grad.is_contiguous() and (grad.dtype, grad.device) == (parameter.dtype, parameter.device)


def _shared() -> bool:
    """Return whether processes may wait for each other's gradients."""
    return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
