"""Tensors that are slices of one stack and say so, so that what is done to each can be done to all in one launch.

The experts of a layer travel as thousands of small tensors, and each operation of its own on each of them costs more
than the bytes do. `slices` cuts a stack and leaves a note on every slice; `slice_of` reads it, and finds none where a
slice was replaced, copied or cast on its way.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_NOTE = "_lit_qrl_slice"


class Slice(NamedTuple):
    """Where a tensor lies: in which stack, at which index of its first dimension, so many bytes from its start."""

    stack: Tensor
    index: int
    offset: int
    shape: torch.Size


def slices(stack: Tensor) -> tuple[Tensor, ...]:
    """Return the views of a stack along its first dimension, each with its `Slice`.

    >>> import torch
    >>> [one.tolist() for one in slices(torch.eye(2))]
    [[1.0, 0.0], [0.0, 1.0]]
    """
    cut = stack.unbind(0)
    step, shape = stack.stride(0) * stack.element_size(), stack.shape[1:]
    for index, one in enumerate(cut):
        setattr(one, _NOTE, Slice(stack, index, index * step, shape))
    return cut


def slice_of(tensor: Tensor) -> Slice | None:
    """Return where a tensor lies, or None for one that `slices` did not cut or that was moved since.

    >>> import torch
    >>> stack = torch.zeros(2, 3)
    >>> slice_of(slices(stack)[1]).index, slice_of(stack[1])
    (1, None)
    """
    found: Slice | None = getattr(tensor, _NOTE, None)
    if found is None:
        return None
    here = tensor.data_ptr() == found[0].data_ptr() + found[2] and tensor.shape == found[3]
    return found if here else None
