"""Triton kernels that take fp32 weights apart into bf16 and the rest, and join them; import only where Triton is.

Each reads and writes every number once, where plain operations make a dozen passes over memory. They are of integers,
so that both give the same bits.
"""

# Kernels are compiled from their source and launched with arguments that their Python signature does not have.
# pyright: reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

SIZE = 4096
"""Numbers that a program takes."""


@triton.jit
def _join_kernel(weight, low, master, count, SIZE: tl.constexpr):
    """bits(master) = bits(weight) · 2¹⁶ + low."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < count
    upper = tl.load(weight + at, mask=inside, other=0).to(tl.int32) << 16
    tl.store(master + at, upper + tl.load(low + at, mask=inside, other=0).to(tl.int32), mask=inside)


@triton.jit
def _split_kernel(master, weight, low, count, SIZE: tl.constexpr):
    """The nearest bf16 number, away from zero halfway between two, and what the master has beyond it."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < count
    bits = tl.load(master + at, mask=inside, other=0)
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)  # one NaN for all
    upper = (bits + 0x8000) >> 16
    tl.store(weight + at, upper.to(tl.int16), mask=inside)
    tl.store(low + at, (bits - (upper << 16)).to(tl.int16), mask=inside)


def join(weight: Tensor, low: Tensor) -> Tensor:
    """Return the fp32 weights of which `weight` has the nearest bf16 numbers.

    Args:
        weight: bf16, contiguous.
        low: int16, of its shape, contiguous.
    """
    master = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    count = weight.numel()
    _join_kernel[(triton.cdiv(count, SIZE),)](
        weight.view(torch.int16), low, master.view(torch.int32), count, SIZE, num_warps=8
    )
    return master


def split(master: Tensor, weight: Tensor, low: Tensor) -> None:
    """Write the nearest bf16 numbers of fp32 weights over `weight`, and the rest over `low`.

    Args:
        master: fp32.
        weight: bf16, of its shape, contiguous; autograd does not see the write.
        low: int16, of its shape, contiguous.
    """
    count = master.numel()
    _split_kernel[(triton.cdiv(count, SIZE),)](
        master.contiguous().view(torch.int32), weight.view(torch.int16), low, count, SIZE, num_warps=8
    )
