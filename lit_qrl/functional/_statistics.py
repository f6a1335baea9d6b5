"""Sums and moments over the masked entries of a mini-batch, global over ranks and without a host synchronisation."""

import torch
from torch import Tensor

from lit_qrl.types import AllReduce, no_all_reduce


def as_float(value: Tensor) -> Tensor:
    """Return `value` in at least fp32: half types are raised, float64 stays.

    >>> as_float(torch.zeros(1, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return value.float() if value.dtype.itemsize < 4 or not value.is_floating_point() else value


def precise(value: Tensor) -> Tensor:
    """Return `value` in fp64, or in fp32 on a device that has none.

    Moments by sums then need no second pass over the data (and no second collective), and small differences keep
    their digits; on some hundred thousand tokens that costs nothing.

    >>> precise(torch.zeros(1, dtype=torch.bfloat16)).dtype
    torch.float64
    """
    return as_float(value) if value.device.type == "mps" else value.double()


def masked(mask: Tensor, value: Tensor, fill: float = 0.0) -> Tensor:
    """Return `value` where `mask` is True and `fill` elsewhere, whatever stood there (NaN too).

    >>> masked(torch.tensor([True, False]), torch.tensor([2.0, float("nan")]))
    tensor([2., 0.])
    """
    return torch.where(mask, value, fill)


def masked_sums(mask: Tensor, *values: Tensor, all_reduce: AllReduce = no_all_reduce) -> Tensor:
    """Return the number of True entries followed by the sum of each value over them, in one vector.

    One kernel and one collective for all values: small launches are what these statistics cost.

    >>> masked_sums(torch.tensor([True, False]), torch.tensor([2.0, 9.0]))
    tensor([1., 2.])
    """
    stacked = torch.stack([torch.ones_like(values[0]), *values])
    return all_reduce(masked(mask, stacked).flatten(1).sum(dim=1))


def row_means(mask: Tensor, value: Tensor) -> Tensor:
    """Return the mean of `value` over the True entries of each row, 0 for a row without any: "b t" -> " b".

    >>> row_means(torch.tensor([[True, True], [False, False]]), torch.tensor([[1.0, 3.0], [7.0, 7.0]]))
    tensor([2., 0.])
    """
    return masked(mask, value).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


def share(mask: Tensor, hit: Tensor, all_reduce: AllReduce = no_all_reduce) -> Tensor:
    """Return which share of the True entries of `mask` is hit; 0 if there is none.

    >>> share(torch.tensor([True, True, False]), torch.tensor([True, False, True]))
    tensor(0.5000)
    """
    hits, count = all_reduce(torch.stack([hit & mask, mask]).flatten(1).sum(dim=1)).unbind()
    return hits / count.clamp(min=1)


def largest(mask: Tensor, value: Tensor, all_reduce: AllReduce = no_all_reduce) -> Tensor:
    """Return the maximum of `value` over the True entries, −inf if there is none.

    >>> largest(torch.tensor([True, False]), torch.tensor([2.0, 9.0]))
    tensor(2.)
    """
    return all_reduce(masked(mask, value, -torch.inf).amax(), op="max")
