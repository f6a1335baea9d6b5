"""Triton kernels for activations: 1×128 quantization, by itself or in one pass with the operator before a linear layer.

Import it only where Triton and a CUDA device are. A tile is 128×128, of few rows `LOW`×128, so that there are enough
of them; its rows are read in an order in which a thread holds `DEEP` rows below one another, so that the transposed
codes go through shared memory as whole words.
"""

# Kernels are compiled from their source and launched with arguments that their Python signature does not have.
# pyright: reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from lit_qrl.formats.numerics import E4M3, E4M3_MAX
from lit_qrl.functional._launch import pieces, remembered

TILE = 128
PLAIN, NORM, GATED = 0, 1, 2
WARPS = 8
FEW, LOW, LOW_WARPS = 512, 16, 4
"""Rows up to which tiles are so low, and the warps of one; the transpose is made of high ones alone."""
# With eight warps a warp's load covers four rows, 32 the program: these are the rows that a thread has besides.
DEEP = 4
# The most that a thread may take without spilling, so that a multiprocessor has room for three programs, or two.
REGISTERS = {PLAIN: 80, NORM: 128, GATED: 128}
_MAX = tl.constexpr(E4M3_MAX)
_INVERSE_MAX = tl.constexpr(1.0 / E4M3_MAX)
_SMALLEST = tl.constexpr(float(torch.finfo(torch.float32).tiny))
# Takes more from the approximate inverse than its error of one unit in the last place (2^-23) can have added.
_BELOW = tl.constexpr(1.0 - 2.0**-21)


@triton.jit
def _reciprocal(x, FLUSH: tl.constexpr):
    # one instruction; results below 2^-126 take some more
    if FLUSH:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return tl.inline_asm_elementwise("rcp.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def _inverse(divisor, FLUSH: tl.constexpr):
    """The inverse as the sum of two numbers, right to 2^-40; the second is from 0 to 2^-20 of the first.

    The second is never negative, so that −0 times each of them stays −0; the inverse of inf is zero.
    """
    high = _reciprocal(divisor, FLUSH) * _BELOW
    missing = tl.fma(-divisor, high, tl.full(divisor.shape, 1.0, tl.float32))
    return high, tl.minimum(missing, 1.0) * high


@triton.jit
def _scale(amax):
    """The largest magnitude over 448, correctly rounded: a product, and one correction by its exact remainder."""
    below = tl.full(amax.shape, _INVERSE_MAX, tl.float32)
    scale = amax * below
    scale = tl.fma(tl.fma(-scale, tl.full(amax.shape, _MAX, tl.float32), amax), below, scale)
    return tl.maximum(tl.minimum(scale, float("inf")), _SMALLEST)  # the correction of inf is NaN


@triton.jit
def _quantized(values, AXIS: tl.constexpr):
    """What E4M3 rounds along an axis, and the scales; the values have 8 or 11 digits.

    Of such values, `x · high + x · rest`, rounded once, has the code of the correctly rounded `x / scale`: the quotient
    is either so far from where E4M3 rounds up or down that 2^-24 of it do not count, or exactly there, and then 2^-40
    decide, which the two numbers have. (Compared for all pairs of mantissas of bf16 and of fp16.) It takes two
    instructions an element, and no second way for small scales whose registers a program would have to hold.
    """
    scale = _scale(tl.max(tl.abs(values), axis=AXIS))
    high, rest = _inverse(scale, True)
    high = tl.broadcast_to(tl.expand_dims(high, AXIS), values.shape)
    return tl.fma(values, high, values * tl.expand_dims(rest, AXIS)), scale


@remembered
@triton.jit(do_not_specialize=["m"])  # tokens: each number of them is the same kernel
def _tiles_kernel(
    x, other, rstd, weight, y, rows, rows_scale, columns, columns_scale, m, k, stride, padded, BEFORE: tl.constexpr,
    WRITTEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HEIGHT: tl.constexpr, SIZE: tl.constexpr,
    DEEP: tl.constexpr,
):  # fmt: skip
    """One tile of what the operator before makes: its numbers, and its codes along both sides."""
    tile_k, tile_m = tl.program_id(0), tl.program_id(1)
    apart: tl.constexpr = HEIGHT // DEEP
    # row d of thread row i stands at i + d · apart, where the compiler puts what one thread holds
    place = tl.arange(0, HEIGHT)
    row = tile_m * HEIGHT + (place % apart) * DEEP + place // apart
    column = tile_k * SIZE + tl.arange(0, SIZE)
    inside = (row < m)[:, None] & (column < k)[None, :]
    offsets = row.to(tl.int64)[:, None] * stride + column[None, :]
    dense = row.to(tl.int64)[:, None] * k + column[None, :]
    stored = tl.load(x + offsets, mask=inside, other=0.0)
    dtype: tl.constexpr = x.dtype.element_ty
    values = stored.to(tl.float32)
    if BEFORE == 1:  # rounded where the module rounds: after the normalisation, and after the weight
        inverse = tl.load(rstd + row, mask=row < m, other=0.0)
        scaled = (values * inverse[:, None]).to(dtype).to(tl.float32)
        gain = tl.load(weight + column, mask=column < k, other=0.0).to(tl.float32)
        stored = (gain[None, :] * scaled).to(dtype)
    if BEFORE == 2:  # SiLU of the first, rounded, times the second
        up = tl.load(other + offsets, mask=inside, other=0.0).to(tl.float32)
        high, rest = _inverse(1.0 + libdevice.exp(-values), False)
        gate = tl.fma(values, high, values * rest).to(dtype).to(tl.float32)
        stored = (gate * up).to(dtype)
    if BEFORE > 0:
        if WRITTEN:
            tl.store(y + dense, stored, mask=inside)
        values = stored.to(tl.float32)
    if ROWS:
        quotient, scale = _quantized(values, 1)
        tl.store(rows + dense, quotient.to(rows.dtype.element_ty), mask=inside)
        tl.store(rows_scale + tile_k * m + row, scale, mask=row < m)  # "m k/128", column by column
    if COLUMNS:
        quotient, scale = _quantized(values, 0)
        # transposed while the rows of a thread are still side by side: four codes are one word of shared memory
        turned = tl.permute(tl.reshape(quotient, (DEEP, apart, SIZE)), (2, 1, 0)).to(columns.dtype.element_ty)
        token = tile_m * SIZE + tl.arange(0, SIZE)
        to = columns + column.to(tl.int64)[:, None] * padded + token[None, :]
        tl.store(to, tl.reshape(turned, (SIZE, SIZE)), mask=(column < k)[:, None] & (token < padded)[None, :])
        tl.store(columns_scale + tile_m * k + column, scale, mask=column < k)  # "k m/128", column by column


Tiles = tuple[Tensor, tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None]


def tiles(
    x: Tensor, rows: bool, columns: bool, before: int = PLAIN, other: Tensor | None = None, rstd: Tensor | None = None,
    weight: Tensor | None = None, written: bool = True, warps: int = WARPS, registers: int = 0,
) -> Tiles:  # fmt: skip
    """Return what the operator makes of `x`, and that as E4M3 along its rows and along its columns, as asked for.

    Args:
        x: "m k", bf16 or fp16, k a multiple of 128, the last dimension contiguous.
        rows: make (codes "m k", scales "m k/128").
        columns: make (codes "k m", scales "k m/128"), m padded with zeros to a multiple of 128.
        before: `PLAIN` takes x itself, `NORM` x · rstd · weight, `GATED` SiLU(x) · other.
        other: "m k", laid out as x.
        rstd: " m", fp32.
        weight: " k".
        written: False leaves out the operator's own numbers, which are NaN then, where codes are all that is read.
        warps: of a program.
        registers: the most of a thread; 0 takes what `REGISTERS` says.
    """
    if x.stride(-1) != 1:
        x = x.contiguous()
    if other is not None and other.stride() != x.stride():
        x, other = x.contiguous(), other.contiguous()
    m, k = x.shape
    low = not columns and m <= FEW
    height, warps = (LOW, LOW_WARPS) if low else (TILE, warps)
    tiles_m, tiles_k = pieces(m, height), pieces(k, TILE)
    padded = tiles_m * height
    # what is not made is not written, and no E4M3: Triton knows none below compute capability 8.9
    along = across = along_scale = across_scale = y = x
    if before != PLAIN and not written:
        y = torch.full((), torch.nan, dtype=x.dtype, device=x.device).expand(m, k)
    elif before != PLAIN:
        y = torch.empty((m, k), dtype=x.dtype, device=x.device)
    if rows:
        along = torch.empty((m, k), dtype=E4M3, device=x.device)
        along_scale = torch.empty((tiles_k, m), dtype=torch.float32, device=x.device)
    if columns:
        across = torch.empty((k, padded), dtype=E4M3, device=x.device)
        across_scale = torch.empty((tiles_m, k), dtype=torch.float32, device=x.device)
    nothing = x if other is None else other
    _tiles_kernel[tiles_k, tiles_m](
        x, nothing, along_scale if rstd is None else rstd, x if weight is None else weight, y if written else x, along,
        along_scale, across, across_scale, m, k, x.stride(0), padded, before, written, rows, columns, height, TILE,
        DEEP, num_warps=warps, maxnreg=registers or REGISTERS[before],
    )  # fmt: skip
    return y, (along, along_scale.t()) if rows else None, (across, across_scale.t()) if columns else None


@remembered
@triton.jit
def _gated_backward_kernel(
    grad, gate, up, grad_gate, grad_up, product, count, stride, out_stride, K: tl.constexpr, AGAIN: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """What a program writes it alone has read, so that `product` may be `grad`."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < count
    row, column = at // K, at % K
    held, to = row * stride + column, row * out_stride + column
    upstream = tl.load(grad + at, mask=inside).to(tl.float32)
    g = tl.load(gate + held, mask=inside).to(tl.float32)
    u = tl.load(up + held, mask=inside).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-g))
    silu = g * sigmoid
    dtype: tl.constexpr = product.dtype.element_ty
    if AGAIN:
        tl.store(product + at, (silu.to(dtype).to(tl.float32) * u).to(dtype), mask=inside)
    tl.store(grad_up + to, (upstream * silu).to(grad_up.dtype.element_ty), mask=inside)
    slope = sigmoid + silu * (1.0 - sigmoid)
    tl.store(grad_gate + to, (upstream * u * slope).to(grad_gate.dtype.element_ty), mask=inside)


def gated_backward(grad: Tensor, gate: Tensor, up: Tensor, again: bool = False) -> tuple[Tensor, Tensor]:
    """Return the gradients of both factors of SiLU(gate) · up, "m k" each, side by side where the factors are.

    Args:
        grad: "m k", of the product.
        gate: "m k".
        up: "m k".
        again: write the product itself over its gradient, which must be contiguous.
    """
    if again and not grad.is_contiguous():
        raise ValueError("The gradient is written over, and is not contiguous.")
    grad, k = grad.contiguous(), gate.shape[-1]
    if gate.stride() != up.stride() or gate.stride(-1) != 1:
        gate, up = gate.contiguous(), up.contiguous()
    stride, count, size = gate.stride(-2), grad.numel(), 4096
    if stride == k:
        grad_gate, grad_up = torch.empty_like(grad), torch.empty_like(grad)
    else:
        grad_gate, grad_up = torch.empty((*gate.shape[:-1], 2 * k), dtype=grad.dtype, device=grad.device).split(k, -1)
    tensors = grad, gate, up, grad_gate, grad_up, grad
    _gated_backward_kernel[(pieces(count, size),)](
        *tensors, count, stride, grad_gate.stride(-2), k, again, size, num_warps=8,
    )  # fmt: skip
    return grad_gate, grad_up
