"""Triton kernels for activations: the operator before a linear layer and its 1×128 quantization in one pass.

Import it only where Triton and a CUDA device are. A tile is 128×128; its rows are read in the order (4, 32), so that a
thread holds four rows below one another and packs their codes into one 32-bit word before the tile is transposed.
"""

# Kernels are compiled from their source and launched with arguments that their Python signature does not have.
# pyright: reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from lit_qrl.precision.formats.fused_triton import TILE, _clamp, _low, _quotient, _scale
from lit_qrl.precision.formats.numerics import E4M3, E4M3_MAX

PLAIN, NORM, GATED = 0, 1, 2
WARPS = 8
_MAX = tl.constexpr(E4M3_MAX)


@triton.jit
def _tiles_kernel(
    x, other, rstd, weight, y, rows, rows_scale, columns, columns_scale, m, k, stride, padded, BEFORE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One 128×128 tile of what the operator before makes: its numbers, and its codes along both sides."""
    tile_k, tile_m = tl.program_id(0), tl.program_id(1)
    quarter: tl.constexpr = SIZE // 4
    # row 4i + j of the tile at [j, i]
    row = tile_m * SIZE + tl.arange(0, 4)[:, None] + tl.arange(0, quarter)[None, :] * 4
    column = tile_k * SIZE + tl.arange(0, SIZE)
    inside = (row < m)[:, :, None] & (column < k)[None, None, :]
    offsets = row.to(tl.int64)[:, :, None] * stride + column[None, None, :]
    dense = row.to(tl.int64)[:, :, None] * k + column[None, None, :]
    stored = tl.load(x + offsets, mask=inside, other=0.0)
    dtype: tl.constexpr = x.dtype.element_ty
    values = stored.to(tl.float32)
    if BEFORE == 1:  # rounded where the module rounds: after the normalisation, and after the weight
        inverse = tl.load(rstd + row, mask=row < m, other=0.0)
        scaled = (values * inverse[:, :, None]).to(dtype).to(tl.float32)
        gain = tl.load(weight + column, mask=column < k, other=0.0).to(tl.float32)
        stored = (gain[None, None, :] * scaled).to(dtype)
    if BEFORE == 2:  # SiLU of the first, rounded, times the second
        up = tl.load(other + offsets, mask=inside, other=0.0).to(tl.float32)
        gate = tl.div_rn(values, 1.0 + libdevice.exp(-values)).to(dtype).to(tl.float32)
        stored = (gate * up).to(dtype)
    if BEFORE > 0:
        tl.store(y + dense, stored, mask=inside)
        values = stored.to(tl.float32)
    magnitude = tl.abs(values)
    if ROWS:
        amax = tl.max(magnitude, axis=2)
        scale = _scale(amax)
        quotient = _quotient(values, scale[:, :, None], tl.min(_low(scale, amax), axis=0))
        codes = _clamp(quotient, -_MAX, _MAX).to(rows.dtype.element_ty)
        tl.store(rows + dense, codes, mask=inside)
        tl.store(rows_scale + tile_k * m + row, scale, mask=row < m)  # "m k/128", column by column
    if COLUMNS:
        amax = tl.max(tl.max(magnitude, axis=0), axis=0)
        scale = _scale(amax)
        quotient = _quotient(values, scale[None, None, :], _low(scale, amax))
        codes = _clamp(quotient, -_MAX, _MAX).to(rows.dtype.element_ty).to(tl.uint8, bitcast=True).to(tl.int32)
        words = tl.sum(codes << (tl.arange(0, 4) * 8)[:, None, None], axis=0)
        place = tile_m * quarter + tl.arange(0, quarter)
        to = columns + column.to(tl.int64)[None, :] * (padded // 4) + place[:, None]
        tl.store(to, words, mask=(column < k)[None, :] & (place < padded // 4)[:, None])
        tl.store(columns_scale + tile_m * k + column, scale, mask=column < k)  # "k m/128", column by column


Tiles = tuple[Tensor, tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None]


def tiles(
    x: Tensor, rows: bool, columns: bool, before: int = PLAIN, other: Tensor | None = None, rstd: Tensor | None = None,
    weight: Tensor | None = None, warps: int = WARPS,
) -> Tiles:  # fmt: skip
    """Return what the operator makes of `x`, and that as E4M3 along its rows and along its columns, as asked for.

    Args:
        x: "m k", k a multiple of 128, the last dimension contiguous.
        rows: make (codes "m k", scales "m k/128").
        columns: make (codes "k m", scales "k m/128"), m padded with zeros to a multiple of 128.
        before: `PLAIN` takes x itself, `NORM` x · rstd · weight, `GATED` SiLU(x) · other.
        other: "m k", laid out as x.
        rstd: " m", fp32.
        weight: " k".
        warps: of a program.
    """
    if x.stride(-1) != 1:
        x = x.contiguous()
    if other is not None and other.stride() != x.stride():
        x, other = x.contiguous(), other.contiguous()
    m, k = x.shape
    padded = triton.cdiv(m, TILE) * TILE
    tiles_m, tiles_k = padded // TILE, triton.cdiv(k, TILE)
    code = torch.empty(0, dtype=E4M3, device=x.device)
    along, across, along_scale, across_scale, y = code, code, x, x, x
    if before != PLAIN:
        y = torch.empty((m, k), dtype=x.dtype, device=x.device)
    if rows:
        along = torch.empty((m, k), dtype=E4M3, device=x.device)
        along_scale = torch.empty((tiles_k, m), dtype=torch.float32, device=x.device)
    if columns:
        across = torch.empty((k, padded), dtype=E4M3, device=x.device)
        across_scale = torch.empty((tiles_m, k), dtype=torch.float32, device=x.device)
    nothing = x if other is None else other
    _tiles_kernel[(tiles_k, tiles_m)](
        x, nothing, along_scale if rstd is None else rstd, x if weight is None else weight, y, along, along_scale,
        across.view(torch.int32) if columns else across.view(torch.uint8), across_scale, m, k, x.stride(0), padded,
        before, rows, columns, TILE, num_warps=warps,
    )  # fmt: skip
    return y, (along, along_scale.t()) if rows else None, (across, across_scale.t()) if columns else None


@triton.jit
def _norm_backward_kernel(
    grad, x, rstd, weight, grad_x, grad_weight, m, k, SIZE: tl.constexpr
):  # fmt: skip
    """Rows pid, pid + programs, …: their input's gradient, and the sum of their parts of the weight's."""
    column = tl.arange(0, SIZE)
    inside = column < k
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((SIZE,), tl.float32)
    for row in range(tl.program_id(0), m, tl.num_programs(0)):
        at = (tl.zeros((1,), tl.int64) + row) * k + column
        inverse = tl.load(rstd + row)
        unit = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * inverse
        upstream = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        total += upstream * unit
        scaled = upstream * gain
        mean = tl.sum(scaled * unit, axis=0) / k
        tl.store(grad_x + at, ((scaled - unit * mean) * inverse).to(grad_x.dtype.element_ty), mask=inside)
    tl.store(grad_weight + tl.program_id(0) * k + column, total, mask=inside)


def norm_backward(grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, programs: int = 528) -> tuple[Tensor, Tensor]:
    """Return the gradients of `x` ("m k") and of the weight " k" (fp32) of an RMS norm, for the gradient "m k"."""
    m, k = x.shape
    grad, x = grad.contiguous(), x.contiguous()
    programs = min(programs, m)  # 528: four for each of 132 multiprocessors
    grad_x = torch.empty_like(x)
    partial = torch.empty((programs, k), dtype=torch.float32, device=x.device)
    size = triton.next_power_of_2(k)
    _norm_backward_kernel[(programs,)](grad, x, rstd, weight, grad_x, partial, m, k, size, num_warps=8)
    return grad_x, partial.sum(dim=0)


@triton.jit
def _gated_backward_kernel(grad, gate, up, grad_gate, grad_up, count, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < count
    upstream = tl.load(grad + at, mask=inside).to(tl.float32)
    g = tl.load(gate + at, mask=inside).to(tl.float32)
    u = tl.load(up + at, mask=inside).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-g))
    silu = g * sigmoid
    tl.store(grad_up + at, (upstream * silu).to(grad_up.dtype.element_ty), mask=inside)
    slope = sigmoid + silu * (1.0 - sigmoid)
    tl.store(grad_gate + at, (upstream * u * slope).to(grad_gate.dtype.element_ty), mask=inside)


def gated_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of both factors of SiLU(gate) · up, "m k" each."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    size = 4096
    _gated_backward_kernel[(triton.cdiv(gate.numel(), size),)](
        grad, gate, up, grad_gate, grad_up, gate.numel(), size, num_warps=8
    )
    return grad_gate, grad_up
