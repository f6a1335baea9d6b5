"""NVFP4 codes and scales in one pass over a weight; import it only where Triton and a CUDA device are."""

# Kernels are compiled from their source and launched with arguments that their Python signature does not have.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from lit_qrl.formats.kernels.fp8_triton import _greater
from lit_qrl.formats.numerics import E4M3, E4M3_MAX, FP4_MAX
from lit_qrl.functional._launch import remembered

BLOCK = 16
# Blocks of one program: one for each thread of four warps.
BLOCKS = 128
_MAX = tl.constexpr(E4M3_MAX)


@triton.jit
def _rounded(x, wanted, global_scale, smallest):
    """The nearest E4M3 scale, what the block is divided by, and its codes, of which a tie goes to the even one."""
    # as `numerics.round_e4m3`: 1.5 · 2^20 times its power of two is added and taken away
    scale = tl.minimum(wanted, _MAX)
    power = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    shift = tl.maximum(power, 0.015625) * 1572864.0
    scale = (scale + shift) - shift
    scale = tl.where(scale == 0, smallest, scale)
    divisor = tl.div_rn(scale, global_scale)
    q = tl.div_rn(x, tl.broadcast_to(divisor[:, None], x.shape))
    size = tl.abs(q)
    codes = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    codes += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    codes += (size > 5.0).to(tl.int32) + (q < 0).to(tl.int32) * 8
    return scale, divisor, codes


@triton.jit
def _squared_error(x, codes, divisor, SIZE: tl.constexpr):
    """The sum of squared errors of a block of 16, in pairs of neighbours."""
    size = codes & 7
    value = tl.where(size < 5, size.to(tl.float32) * 0.5, tl.where(size == 5, 3.0, tl.where(size == 6, 4.0, 6.0)))
    value = tl.where(codes > 7, -value, value)
    error = value * tl.broadcast_to(divisor[:, None], x.shape) - x
    a, b = tl.split(tl.reshape(error * error, (SIZE, 8, 2)))
    a, b = tl.split(tl.reshape(a + b, (SIZE, 4, 2)))
    a, b = tl.split(tl.reshape(a + b, (SIZE, 2, 2)))
    a, b = tl.split(a + b)
    return a + b


@remembered
@triton.jit
def _nvfp4_kernel(
    weight, whole, packed, scales, bad, blocks, each, inverse, smallest, LOW: tl.constexpr, FOUR: tl.constexpr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
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
    wanted = global_scale * steps
    scale, divisor, codes = _rounded(x, wanted, global_scale, smallest)
    if FOUR:
        larger, wider, coarser = _rounded(x, wanted * 1.5, global_scale, smallest)
        better = _squared_error(x, coarser, wider, SIZE) < _squared_error(x, codes, divisor, SIZE)
        scale = tl.where(better, larger, scale)
        codes = tl.where(tl.broadcast_to(better[:, None], x.shape), coarser, codes)
    low, high = tl.split(tl.reshape(codes, (SIZE, BLOCK // 2, 2)))
    to = packed + block[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    tl.store(to, (low | (high << 4)).to(tl.uint8), mask=inside[:, None])
    tl.store(scales + block, scale.to(scales.dtype.element_ty), mask=inside)


def nvfp4_blocks(
    weights: Tensor, global_scales: Tensor, zero_scale: float, four_over_six: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes "matrices out in/2", scales "matrices out in/16" in E4M3, and for each matrix NaN where it has one.

    Args:
        weights: "matrices out in", bf16, fp16 or fp32; in a multiple of 16.
        global_scales: " matrices", fp32.
        zero_scale: of a block whose scale rounds to zero.
        four_over_six: give a block a scale 1.5 times as large where its squared error is smaller so.
    """
    weights = weights.contiguous()
    matrices, rows, columns = weights.shape
    packed = torch.empty((matrices, rows, columns // 2), dtype=torch.uint8, device=weights.device)
    scales = torch.empty((matrices, rows, columns // BLOCK), dtype=E4M3, device=weights.device)
    bad = torch.zeros(matrices, dtype=torch.float32, device=weights.device)
    count = scales.numel()
    _nvfp4_kernel[(triton.cdiv(count, BLOCKS),)](
        weights, global_scales, packed, scales, bad, count, max(count // max(matrices, 1), 1), 1.0 / FP4_MAX,
        zero_scale, weights.dtype != torch.float32, four_over_six, BLOCKS, BLOCK, num_warps=4,
        enable_fp_fusion=False,  # products are rounded before they are added, as torch rounds them
    )  # fmt: skip
    return packed, scales, bad
