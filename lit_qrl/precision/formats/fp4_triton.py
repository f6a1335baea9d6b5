"""Packing of numbers into E2M1 codes in one pass; import it only where Triton and a CUDA device are."""

# Kernels are compiled from their source and launched with arguments that their Python signature does not have.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

# Blocks of one program: one for each thread of four warps.
BLOCKS = 128


@triton.jit
def _pack_kernel(values, divisors, packed, blocks, BLOCK: tl.constexpr, SIZE: tl.constexpr):
    """Two codes a byte, the first one in the low half, as `numerics.to_fp4_codes` and `pack_nibbles` make them."""
    block = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = block < blocks
    x = tl.load(values + block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], mask=inside[:, None], other=0.0)
    divisor = tl.load(divisors + block, mask=inside, other=1.0)
    q = tl.div_rn(x.to(tl.float32), tl.broadcast_to(divisor[:, None], x.shape))
    size = tl.abs(q)
    # a tie goes to the even code
    codes = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    codes += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    codes += (size > 5.0).to(tl.int32) + (q < 0).to(tl.int32) * 8
    low, high = tl.split(tl.reshape(codes, (SIZE, BLOCK // 2, 2)))
    to = packed + block[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    tl.store(to, (low | (high << 4)).to(tl.uint8), mask=inside[:, None])


def packed_quotients(values: Tensor, divisors: Tensor, block: int) -> Tensor:
    """Return two E2M1 codes a byte "out in/2" of `values` divided block by block, quotients in fp32.

    Args:
        values: "out in", bf16, fp16 or fp32.
        divisors: "out in/block", fp32.
        block: inputs that share a divisor; a power of two that divides in.
    """
    values = values.contiguous()
    packed = torch.empty((values.shape[0], values.shape[1] // 2), dtype=torch.uint8, device=values.device)
    grid = (triton.cdiv(divisors.numel(), BLOCKS),)
    _pack_kernel[grid](values, divisors.contiguous(), packed, divisors.numel(), block, BLOCKS, num_warps=4)
    return packed
