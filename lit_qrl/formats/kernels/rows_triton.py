"""Triton kernels that gather rows or add to them; import it only where Triton and a CUDA device are."""

# Kernels are compiled from their source and launched with arguments that their Python signature does not have.
# pyright: reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from lit_qrl.functional._launch import pieces, power_of_2

SIZE = 2048
"""Numbers of a row that a program takes at most."""


@triton.jit
def _summed_kernel(x, place, copies, out, width, shared, count, SIZE: tl.constexpr):
    """A piece of a row: the sum of its copies in fp32, in their order, or the one row that it is."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = column < width
    to = out + row * width + column
    if row < shared:
        total = tl.zeros((SIZE,), tl.float32)
        for number in range(count):
            at = tl.load(copies + row * count + number)
            there = column < tl.where(at < 0, 0, width)
            total += tl.load(x + at * width + column, mask=there, other=0.0).to(tl.float32)
        tl.store(to, total.to(out.dtype.element_ty), mask=inside)
    else:
        at = tl.load(place + row)
        tl.store(to, tl.load(x + at * width + column, mask=inside), mask=inside)


def summed(x: Tensor, place: Tensor, copies: Tensor) -> Tensor:
    """Return rows "n …" of `x` ("m …"), the first p of them sums over several.

    Args:
        x: "m …".
        place: " n", int64, which row of `x` each is.
        copies: "p count", int64, which rows of `x` are added up to each of the first p; −1 is none.
    """
    x = x.contiguous()
    out = torch.empty((len(place), *x.shape[1:]), dtype=x.dtype, device=x.device)
    width = x[0].numel()
    size = min(power_of_2(width), SIZE)
    _summed_kernel[len(place), pieces(width, size)](x, place, copies, out, width, *copies.shape, size, num_warps=4)
    return out


@triton.jit
def _returned_kernel(x, index, place, out, width, SIZE: tl.constexpr):
    """A piece of a row: the row of `x` that was taken from here, or zeros where it was taken from elsewhere."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    at = tl.load(index + row)
    inside = column < tl.where(tl.load(place + at) == row, width, 0)
    values = tl.load(x + at * width + column, mask=inside, other=0.0)
    tl.store(out + row * width + column, values, mask=column < width)


def returned(x: Tensor, index: Tensor, place: Tensor) -> Tensor:
    """Return the gradient "m …" of rows of which " n" were gathered, for the gradient "n …" of those.

    Args:
        x: "n …".
        index: " m", int64, which of the gathered rows may be each.
        place: " n", int64, from which of the m each was gathered.
    """
    x = x.contiguous()
    out = torch.empty((len(index), *x.shape[1:]), dtype=x.dtype, device=x.device)
    width = x[0].numel()
    size = min(power_of_2(width), SIZE)
    _returned_kernel[len(index), pieces(width, size)](x, index, place, out, width, size, num_warps=4)
    return out


@triton.jit
def _added_kernel(x, row, width, SIZE: tl.constexpr):
    """A piece of a row: the sum of two numbers in fp32, rounded once."""
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = column < width
    at = x + tl.program_id(0).to(tl.int64) * width + column
    total = tl.load(at, mask=inside).to(tl.float32) + tl.load(row + column, mask=inside).to(tl.float32)
    tl.store(at, total.to(x.dtype.element_ty), mask=inside)


def added_to_each(x: Tensor, row: Tensor) -> Tensor:
    """Return `x` with `row` added to each of its rows in place.

    Args:
        x: "m k", contiguous.
        row: " k", contiguous.
    """
    width = x.shape[1]
    size = min(power_of_2(width), SIZE)
    _added_kernel[len(x), pieces(width, size)](x, row, width, size, num_warps=4)
    return x
