"""NVFP4 codes and scales in one pass over a weight; import it only where Triton and a CUDA device are."""

# Kernels are compiled from their source and launched with arguments that their Python signature does not have.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from lit_qrl.formats.numerics import E4M3, E4M3_MAX, FP4_MAX

BLOCK = 16
# Blocks of one program: one for each thread of four warps.
BLOCKS = 128
_MAX = tl.constexpr(E4M3_MAX)


@triton.jit
def _greater(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _nvfp4_kernel(
    weight, whole, packed, scales, bad, blocks, each, inverse, smallest, LOW: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """`SIZE` blocks, `each` to a matrix: amax, E4M3 scale, and two codes a byte, rounded as the weight's dtype is."""
    block = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = block < blocks
    x = tl.load(weight + block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], mask=inside[:, None], other=0.0)
    x = x.to(tl.float32)
    amax = tl.reduce(tl.abs(x), 1, _greater)
    wrong = ((amax != amax) | (amax > 3.4028234663852886e38)) & inside
    matrix = block // each
    tl.store(bad + matrix, tl.full((SIZE,), float("nan"), tl.float32), mask=wrong)
    global_scale = tl.load(whole + matrix, mask=inside, other=1.0)
    steps = amax * inverse  # torch divides a CUDA tensor by a number as it multiplies by the fp32 inverse
    if LOW:
        steps = steps.to(weight.dtype.element_ty).to(tl.float32)
    scale = tl.minimum(global_scale * steps, _MAX)
    # to the nearest E4M3 number, as `numerics.round_e4m3`: 1.5 · 2^20 times its power of two is added and taken away
    power = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    shift = tl.maximum(power, 0.015625) * 1572864.0
    scale = (scale + shift) - shift
    scale = tl.where(scale == 0, smallest, scale)
    divisor = tl.div_rn(scale, global_scale)
    q = tl.div_rn(x, tl.broadcast_to(divisor[:, None], x.shape))
    size = tl.abs(q)
    # a tie goes to the even code
    codes = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    codes += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    codes += (size > 5.0).to(tl.int32) + (q < 0).to(tl.int32) * 8
    low, high = tl.split(tl.reshape(codes, (SIZE, BLOCK // 2, 2)))
    to = packed + block[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    tl.store(to, (low | (high << 4)).to(tl.uint8), mask=inside[:, None])
    tl.store(scales + block, scale.to(scales.dtype.element_ty), mask=inside)


def nvfp4_blocks(weights: Tensor, global_scales: Tensor, zero_scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes "matrices out in/2", scales "matrices out in/16" in E4M3, and for each matrix NaN where it has one.

    Args:
        weights: "matrices out in", bf16, fp16 or fp32; in a multiple of 16.
        global_scales: " matrices", fp32.
        zero_scale: of a block whose scale rounds to zero.
    """
    weights = weights.contiguous()
    matrices, rows, columns = weights.shape
    packed = torch.empty((matrices, rows, columns // 2), dtype=torch.uint8, device=weights.device)
    scales = torch.empty((matrices, rows, columns // BLOCK), dtype=E4M3, device=weights.device)
    bad = torch.zeros(matrices, dtype=torch.float32, device=weights.device)
    count = scales.numel()
    _nvfp4_kernel[(triton.cdiv(count, BLOCKS),)](
        weights, global_scales, packed, scales, bad, count, max(count // max(matrices, 1), 1), 1.0 / FP4_MAX,
        zero_scale, weights.dtype != torch.float32, BLOCKS, BLOCK, num_warps=4,
    )  # fmt: skip
    return packed, scales, bad
