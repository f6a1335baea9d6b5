"""Triton kernels of an RMS norm and of the residual sum before it, forth and back; import it only where Triton is.

    h = x + residual;  r = 1 / sqrt(mean h² + ε);  y = weight · (h r)
    dh = dh' + r (w dy − u mean(w dy u)) with u = h r;  dw = Σ dy u

where dh' is the gradient that h has from elsewhere: a decoder's residual stream.
"""

# Kernels are compiled from their source and launched with arguments that their Python signature does not have.
# pyright: reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from lit_qrl.formats.kernels.tiles_triton import _quantized
from lit_qrl.formats.numerics import E4M3
from lit_qrl.functional._launch import pieces, power_of_2, remembered

# A program holds a row's gain, sum and two inputs: sixteen columns a thread leave room for two programs at sixteen
# warps. Of narrow rows, heads say, it has several; of rows beyond 8192 columns more than its registers hold.
COLUMNS_PER_WARP, LEAST, MOST_WARPS = 512, 2048, 16


@remembered
@triton.jit(do_not_specialize=["m"])  # tokens: each number of them is the same kernel
def _norm_kernel(
    x, residual, weight, summed, y, rstd, codes, scales, m, k, eps, ADD: tl.constexpr, SCALE: tl.constexpr,
    EXTENT: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Some rows, rounded where the modules round: after the sum, after the normalisation, and after the weight; and
    E4M3 codes of these, whose scales cover `EXTENT` columns each.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, SIZE)[None, :]
    at = row.to(tl.int64)[:, None] * k + column
    inside = (row < m)[:, None] & (column < k)
    wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        total = (wide + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)).to(summed.dtype.element_ty)
        tl.store(summed + at, total, mask=inside)
        wide = total.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=1) / k + eps)
    if SCALE:
        dtype: tl.constexpr = y.dtype.element_ty
        gain = tl.load(weight + column, mask=column < k, other=0.0).to(tl.float32)
        made = (gain * (wide * inverse[:, None]).to(dtype).to(tl.float32)).to(dtype)
        tl.store(y + at, made, mask=inside)
        if EXTENT > 0:
            parts: tl.constexpr = SIZE // EXTENT
            quotient, scale = _quantized(tl.reshape(made.to(tl.float32), (ROWS, parts, EXTENT)), 2)
            tl.store(codes + at, tl.reshape(quotient, (ROWS, SIZE)).to(codes.dtype.element_ty), mask=inside)
            part = tl.arange(0, parts)[None, :]
            there = (row < m)[:, None] & (part * EXTENT < k)
            tl.store(scales + part * m + row[:, None], scale, mask=there)  # "m k/extent", column by column
    tl.store(rstd + row, inverse, mask=row < m)


def _shape(k: int) -> tuple[int, int, int]:
    """Return the rows, the columns and the warps of a program over rows of k columns: powers of two.

    >>> [_shape(k) for k in (128, 1536, 8192)]
    [(16, 128, 4), (1, 2048, 4), (1, 8192, 16)]
    """
    size = power_of_2(k)
    rows = max(LEAST // size, 1)
    return rows, size, min(max(rows * size // COLUMNS_PER_WARP, 1), MOST_WARPS)


def norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, scale: bool = True, extent: int = 0
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """Return h, y and r, as the formulas above, and what E4M3 makes of y; h is `x` itself without a residual, y is h
    where it is not asked for.

    Args:
        x: "m k".
        weight: " k".
        eps: ε.
        residual: "m k", or None.
        scale: whether y is wanted.
        extent: make (codes "m k", scales "m k/extent") of y; −1 is the whole row.
    """
    m, k = x.shape
    x = x.contiguous()
    summed = x if residual is None else torch.empty_like(x)
    y = torch.empty_like(x) if scale else summed
    rstd = torch.empty(m, dtype=torch.float32, device=x.device)
    rows, size, warps = _shape(k)
    codes = scales = x
    if extent:
        parts = 1 if extent < 0 else pieces(k, extent)
        codes = torch.empty((m, k), dtype=E4M3, device=x.device)
        scales = torch.empty((parts, m), dtype=torch.float32, device=x.device)
    _norm_kernel[(pieces(m, rows),)](
        x, x if residual is None else residual.contiguous(), weight, summed, y, rstd, codes, scales, m, k, float(eps),
        residual is not None, scale, size if extent < 0 else extent, rows, size, num_warps=warps,
    )  # fmt: skip
    return summed, y, rstd, (codes, scales.t()) if extent else None


@remembered
@triton.jit(do_not_specialize=["m"])  # tokens: each number of them is the same kernel
def _norm_backward_kernel(
    grad, x, beside, rstd, weight, grad_x, grad_weight, m, k, ADD: tl.constexpr, ROWS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Rows pid, pid + programs, …, or as many at a time as a program has: the gradient of their input, and the sum of
    their parts of the weight's.
    """
    column = tl.arange(0, SIZE)
    gain = tl.load(weight + column, mask=column < k, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros((ROWS, SIZE), tl.float32)
    for start in range(tl.program_id(0) * ROWS, m, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None] * k + column[None, :]
        inside = (row < m)[:, None] & (column < k)[None, :]
        inverse = tl.load(rstd + row, mask=row < m, other=0.0)[:, None]
        unit = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * inverse
        upstream = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        total += upstream * unit
        scaled = upstream * gain
        mean = tl.sum(scaled * unit, axis=1) / k
        made = (scaled - unit * mean[:, None]) * inverse
        if ADD:
            made += tl.load(beside + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x + at, made.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(grad_weight + tl.program_id(0) * k + column, tl.sum(total, axis=0), mask=column < k)


def norm_backward(
    grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, beside: Tensor | None = None, programs: int = 528,
    warps: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients of h ("m k") and of the weight " k" (fp32), for the gradient "m k" of y.

    Args:
        grad: "m k", of the norm's output.
        x: "m k", its input h.
        rstd: " m", fp32.
        weight: " k".
        beside: "m k", the gradient that h has from elsewhere, or None.
        programs: that share the rows; 528 are four for each of 132 multiprocessors.
        warps: of a program; 0 takes one for each 512 columns.
    """
    m, k = x.shape
    grad, x = grad.contiguous(), x.contiguous()
    rows, size, own_warps = _shape(k)
    programs = max(min(programs, pieces(m, rows)), 1)
    grad_x = torch.empty_like(x)
    partial = torch.empty((programs, k), dtype=torch.float32, device=x.device)
    _norm_backward_kernel[(programs,)](
        grad, x, grad if beside is None else beside.contiguous(), rstd, weight, grad_x, partial, m, k,
        beside is not None, rows, size, num_warps=warps or own_warps,
    )  # fmt: skip
    return grad_x, partial.sum(dim=0)
