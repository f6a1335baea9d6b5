"""How much of an optimizer's update survives the rounding of the weights that it is applied to."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Build = Callable[[Any], Optimizer]
STEPS, SIZE = 100, 64
SIGMA = 0.02
"""Standard deviation of the weights of a language model's matrices: the usual `initializer_range`."""
CONSTANT_SHARE = 0.3
"""Of the gradient's size, what is the same in every step; the rest is noise, as of a batch."""


class Realized(NamedTuple):
    """What became of an update.

    Args:
        projected: (W₁₀₀ − W₀) · U / U · U, where U is the update in fp32.
        moved: of the weights that U moves, the share that moved.
    """

    projected: float
    moved: float


def realized_update(
    optimizer: Build,
    wrap: Callable[[Sequence[tuple[str, nn.Parameter]], Build], Optimizer],
    dtype: torch.dtype,
    read: Callable[[Optimizer, nn.Parameter], Tensor] = lambda _, parameter: parameter.detach().float(),
    steps: int = STEPS,
    shapes: Sequence[tuple[int, ...]] = ((SIZE, SIZE),),
) -> Realized:
    """Return the share of an optimizer's update that weights of a dtype realize, against fp32 on the same gradients.

    On a matrix of 64 × 64 weights of size 0.02, with gradients of a constant part and noise, drawn once.

    Args:
        optimizer: makes one from pairs of name and parameter, with its own rate.
        wrap: makes the optimizer that is looked at, from such pairs and `optimizer`.
        dtype: of the weights and their gradients.
        read: from that optimizer and a parameter to the weights as fp32.
        steps: of the optimizer.
        shapes: of the weights.
    """
    generator = torch.Generator().manual_seed(0)
    # On the grid of the dtype, as a checkpoint of that dtype is.
    start = [(SIGMA * torch.randn(shape, generator=generator)).to(dtype).float() for shape in shapes]
    constant = [CONSTANT_SHARE * torch.randn(shape, generator=generator) for shape in shapes]
    names = [f"layers.{i}.up_proj.weight" for i in range(len(shapes))]
    exact = [nn.Parameter(weight.clone()) for weight in start]
    rounded = [nn.Parameter(weight.to(dtype, copy=True)) for weight in start]
    runs = [
        (exact, optimizer(list(zip(names, exact, strict=True)))),
        (rounded, wrap(list(zip(names, rounded, strict=True)), optimizer)),
    ]
    for _ in range(steps):
        gradients = [part + torch.randn(part.shape, generator=generator) for part in constant]
        for parameters, one in runs:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.to(parameter.dtype)
            one.step()
    wanted = torch.cat([(new.detach() - old).flatten() for new, old in zip(exact, start, strict=True)]).double()
    found = torch.cat(
        [(read(runs[1][1], new) - old).flatten() for new, old in zip(rounded, start, strict=True)]
    ).double()
    moves = wanted != 0
    return Realized(float(found @ wanted / (wanted @ wanted)), float((found[moves] != 0).double().mean()))
