"""A Triton kernel that gathers rows and adds copies of them up; import it only where Triton and a CUDA device are."""

# Kernels are compiled from their source and launched with arguments that their Python signature does not have.
# pyright: reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from lit_qrl.functional._launch import pieces, power_of_2, remembered

SIZE = 2048
"""Numbers of a row that a program takes at most."""


@remembered
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
