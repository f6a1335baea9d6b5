"""Triton kernels of E4M3 codes by block and by row; import it only where Triton and a CUDA device are.

Every division is the correctly rounded one and every intermediate has the dtype that torch gives it, so that codes
and scales are those of the plain operations bit for bit.
"""

# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false
# Without Triton installed its decorator is unknown, and a kernel looks like a function that is indexed.

# Kernels are compiled from their source and launched with arguments that their Python signature does not have.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from lit_qrl.formats.numerics import E4M3, E4M3_MAX
from lit_qrl.functional._launch import pieces, power_of_2, remembered

TILE = 128
WHOLE = 4096
"""Values of one program where a tensor has one scale."""
_MAX = tl.constexpr(E4M3_MAX)
_SMALLEST = tl.constexpr(float(torch.finfo(torch.float32).tiny))


@triton.jit
def _quotient(x, scale, low):
    """`x / scale`, correctly rounded; `scale` has the rank of `x`, `low` is the smallest scale that counts.

    Markstein's division: the product with the correctly rounded inverse, and one correction by its exact remainder.
    It takes three instructions an element where the general division takes ten and a branch. The remainder must not
    underflow, which it cannot for quotients above 2^-11, all that E4M3 and INT4 tell apart from zero, when the scale
    is above 2^-80; below that the general division serves.
    """
    if low > 8.3e-25:
        inverse = tl.broadcast_to(tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale), x.shape)
        divisor = tl.broadcast_to(scale, x.shape)
        q = x * inverse
        q = tl.where(x == 0, x, tl.fma(tl.fma(-q, divisor, x), inverse, q))  # a correction loses the sign of −0
    else:
        q = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    return q


@triton.jit
def _greater(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _low(scale, amax):
    # the scale of zeros is tiny and divides zeros alone
    return tl.min(tl.where(amax > 0, scale, 1.0), axis=0)


@triton.jit
def _clamp(x, low, high):
    # a NaN must come out as one, as it does of torch.clamp
    bounded = tl.maximum(x, tl.full(x.shape, low, tl.float32), propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(bounded, tl.full(x.shape, high, tl.float32), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _weight_scale(amax, inverse, eps, dtype: tl.constexpr):
    # torch divides a CUDA tensor by a number as it multiplies by the fp32 inverse; the caller refuses a NaN
    scale = (amax * inverse).to(dtype).to(tl.float32)
    return tl.where(scale == 0, eps, scale)


@triton.jit
def _scale(amax):
    scale = tl.div_rn(amax, tl.full(amax.shape, _MAX, tl.float32))
    return tl.maximum(scale, tl.full(amax.shape, _SMALLEST, tl.float32), propagate_nan=tl.PropagateNan.ALL)


@remembered
@triton.jit
def _blocks_kernel(w, codes, scales, n, k, stride, eps, LOW: tl.constexpr, SIZE: tl.constexpr):
    """One 128×128 block of a weight, with the roundings of a weight in its own dtype."""
    block_k, block_n = tl.program_id(0), tl.program_id(1)
    row = block_n * SIZE + tl.arange(0, SIZE)
    column = block_k * SIZE + tl.arange(0, SIZE)
    inside = (row < n)[:, None] & (column < k)[None, :]
    stored = tl.load(w + row.to(tl.int64)[:, None] * stride + column[None, :], mask=inside, other=0.0)
    values = stored.to(tl.float32)
    amax = tl.reduce(tl.reduce(tl.abs(values), 1, _greater), 0, _greater)
    scale = _weight_scale(amax, 1.0 / _MAX, eps, w.dtype.element_ty)
    quotient = _quotient(values, tl.full((1, 1), 1.0, tl.float32) * scale, scale)
    if LOW:
        quotient = quotient.to(w.dtype.element_ty).to(tl.float32)
    quotient = tl.where(quotient == 0, 0.0, _clamp(quotient, -_MAX, _MAX))  # −0 becomes +0, as in `to_e4m3`
    to = row.to(tl.int64)[:, None] * k + column[None, :]
    tl.store(codes + to, quotient.to(codes.dtype.element_ty), mask=inside)
    tl.store(scales + block_n * tl.num_programs(0) + block_k, scale.to(scales.dtype.element_ty))


def fp8_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return E4M3 codes "n k" and scales "n/128 k/128" of a weight, as `FP8Block.quantize` makes them."""
    weight = weight.contiguous()
    n, k = weight.shape
    codes = torch.empty((n, k), dtype=E4M3, device=weight.device)
    grid = (pieces(k, TILE), pieces(n, TILE))
    scales = torch.empty((grid[1], grid[0]), dtype=weight.dtype, device=weight.device)
    eps = torch.finfo(weight.dtype).eps
    low = weight.dtype != torch.float32
    _blocks_kernel[grid](weight, codes, scales, n, k, weight.stride(0), eps, low, TILE, num_warps=8)
    return codes, scales


@remembered
@triton.jit
def _rows_kernel(
    x, codes, scales, stride, eps, K: tl.constexpr, WEIGHT: tl.constexpr, LOW: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """One row of a weight, with the roundings of its own dtype, or of activations: its amax first, then its codes."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    amax = tl.zeros((SIZE,), tl.float32)
    for start in range(0, K, SIZE):
        values = tl.load(x + row * stride + start + column, mask=start + column < K, other=0.0).to(tl.float32)
        amax = _greater(amax, tl.abs(values))
    largest = tl.reduce(amax, 0, _greater, keep_dims=True)
    if WEIGHT:
        scale = _weight_scale(largest, 1.0 / _MAX, eps, x.dtype.element_ty)
    else:
        scale = _scale(largest)
    low = tl.max(scale, axis=0)
    for start in range(0, K, SIZE):
        values = tl.load(x + row * stride + start + column, mask=start + column < K, other=0.0).to(tl.float32)
        quotient = _quotient(values, scale, low)
        if LOW:
            quotient = quotient.to(x.dtype.element_ty).to(tl.float32)
        quotient = _clamp(quotient, -_MAX, _MAX)
        if WEIGHT:
            quotient = tl.where(quotient == 0, 0.0, quotient)  # −0 becomes +0, as in `to_e4m3`
        to = codes + row * K + start + column
        tl.store(to, quotient.to(codes.dtype.element_ty), mask=start + column < K)
    tl.store(scales + row + tl.arange(0, 1), scale.to(scales.dtype.element_ty))


def _rows(x: Tensor, weight: bool) -> tuple[Tensor, Tensor]:
    if x.stride(-1) != 1:
        x = x.contiguous()
    m, k = x.shape
    codes = torch.empty((m, k), dtype=E4M3, device=x.device)
    scales = torch.empty((m, 1), dtype=x.dtype if weight else torch.float32, device=x.device)
    low, eps = weight and x.dtype != torch.float32, torch.finfo(x.dtype).eps
    # 4096 values a step keep a row's state in registers at eight warps
    _rows_kernel[(m,)](x, codes, scales, x.stride(0), eps, k, weight, low, min(power_of_2(k), 4096), num_warps=8)
    return codes, scales


def fp8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return E4M3 codes "n k" and scales "n 1" of a weight, as `FP8Row.quantize` makes them."""
    return _rows(weight, True)


def e4m3_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return E4M3 codes "m k" and scales "m 1" of `x` with a scale per row."""
    return _rows(x, False)


@remembered
@triton.jit
def _largest_kernel(x, partial, n, SIZE: tl.constexpr):
    """The largest magnitude of every so many values."""
    offset = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    amax = tl.zeros((SIZE,), tl.float32)
    for start in range(0, n, tl.num_programs(0) * SIZE):
        values = tl.load(x + start + offset, mask=start + offset < n, other=0.0).to(tl.float32)
        amax = _greater(amax, tl.abs(values))
    tl.store(partial + tl.program_id(0) + tl.arange(0, 1), tl.reduce(amax, 0, _greater, keep_dims=True))


@remembered
@triton.jit
def _whole_kernel(x, partial, codes, scales, n, count, SIZE: tl.constexpr, COUNT: tl.constexpr):
    """Codes of so many values under the one scale, which every program makes of the partial maxima."""
    place = tl.arange(0, COUNT)
    found = tl.load(partial + place, mask=place < count, other=0.0)
    amax = tl.reduce(found, 0, _greater, keep_dims=True)
    scale = _greater(tl.div_rn(amax, tl.full(amax.shape, _MAX, tl.float32)), tl.full(amax.shape, _SMALLEST, tl.float32))
    offset = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    values = tl.load(x + offset, mask=offset < n, other=0.0).to(tl.float32)
    made = _clamp(_quotient(values, scale, tl.max(scale, axis=0)), -_MAX, _MAX).to(codes.dtype.element_ty)
    tl.store(codes + offset, made, mask=offset < n)
    tl.store(scales + tl.arange(0, 1), scale, mask=tl.arange(0, 1) + tl.program_id(0) == 0)


def e4m3_whole(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return E4M3 codes "m k" and the one scale of `x`, a number."""
    x = x.contiguous()
    n = x.numel()
    codes = torch.empty(x.shape, dtype=E4M3, device=x.device)
    scale = torch.empty(1, dtype=torch.float32, device=x.device)
    # at most 1024 maxima, which each program of the second kernel reads out of the cache
    programs = pieces(n, WHOLE)
    count = min(programs, 1024)
    partial = torch.empty(count, dtype=torch.float32, device=x.device)
    _largest_kernel[(count,)](x, partial, n, WHOLE, num_warps=8)
    _whole_kernel[(programs,)](x, partial, codes, scale, n, count, WHOLE, 1024, num_warps=8)
    return codes, scale.reshape(())
