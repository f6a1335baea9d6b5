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

from lit_qrl.functional._launch import pieces, power_of_2, remembered

# A program holds a row's gain, sum and two inputs: sixteen columns a thread leave room for two programs at sixteen
# warps. A wider row is read twice, first for its mean; of narrow ones, heads say, a program has several.
WIDEST, COLUMNS_PER_WARP, PART, LEAST, MOST_WARPS = 8192, 512, 4096, 2048, 16


@triton.jit
def _added(x, residual, summed, at, inside, ADD: tl.constexpr):
    """A piece of h in fp32, rounded and stored where it is a sum."""
    wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        total = (wide + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)).to(summed.dtype.element_ty)
        tl.store(summed + at, total, mask=inside)
        wide = total.to(tl.float32)
    return wide


@triton.jit
def _scaled(wide, inverse, weight, y, at, column, k, inside):
    """Rounded where the module rounds: after the normalisation, and after the weight."""
    dtype: tl.constexpr = y.dtype.element_ty
    gain = tl.load(weight + column, mask=column < k, other=0.0).to(tl.float32)
    tl.store(y + at, (gain * (wide * inverse).to(dtype).to(tl.float32)).to(dtype), mask=inside)


@remembered
@triton.jit
def _norm_kernel(
    x, residual, weight, summed, y, rstd, m, k, eps, ADD: tl.constexpr, SCALE: tl.constexpr, WHOLE: tl.constexpr,
    ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Some rows, or a wide one."""
    if WHOLE:
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        column = tl.arange(0, SIZE)[None, :]
        at = row.to(tl.int64)[:, None] * k + column
        inside = (row < m)[:, None] & (column < k)
        wide = _added(x, residual, summed, at, inside, ADD)
        inverse = tl.rsqrt(tl.sum(wide * wide, axis=1) / k + eps)
        if SCALE:
            _scaled(wide, inverse[:, None], weight, y, at, column, k, inside)
        tl.store(rstd + row, inverse, mask=row < m)
    else:
        at = tl.program_id(0).to(tl.int64) * k
        total = tl.zeros((SIZE,), tl.float32)
        for start in range(0, k, SIZE):
            column = start + tl.arange(0, SIZE)
            wide = _added(x, residual, summed, at + column, column < k, ADD)
            total += wide * wide
        inverse = tl.rsqrt(tl.sum(total, axis=0) / k + eps)
        if SCALE:
            tl.debug_barrier()  # what other threads have written is read
            for start in range(0, k, SIZE):
                column = start + tl.arange(0, SIZE)
                wide = tl.load(summed + at + column, mask=column < k, other=0.0).to(tl.float32)
                _scaled(wide, inverse, weight, y, at + column, column, k, column < k)
        tl.store(rstd + tl.program_id(0), inverse)


def _shape(k: int) -> tuple[bool, int, int]:
    """Return whether a program holds rows of k columns whole, the columns of a piece, and its rows."""
    whole = k <= WIDEST
    size = power_of_2(k) if whole else PART
    return whole, size, max(LEAST // size, 1) if whole else 1


def _warps(columns: int) -> int:
    """Return the warps of a program that holds so many columns of all its rows: a power of two, as those are.

    >>> [_warps(columns) for columns in (128, 2048, 8192, 32768)]
    [1, 4, 16, 16]
    """
    return min(max(columns // COLUMNS_PER_WARP, 1), MOST_WARPS)


def norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, scale: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Return h, y and r, as the formulas above; h is `x` itself without a residual, y is h where it is not asked for.

    Args:
        x: "m k".
        weight: " k".
        eps: ε.
        residual: "m k", or None.
        scale: whether y is wanted.
    """
    m, k = x.shape
    x = x.contiguous()
    summed = x if residual is None else torch.empty_like(x)
    y = torch.empty_like(x) if scale else summed
    rstd = torch.empty(m, dtype=torch.float32, device=x.device)
    whole, size, rows = _shape(k)
    _norm_kernel[(pieces(m, rows),)](
        x, x if residual is None else residual.contiguous(), weight, summed, y, rstd, m, k, float(eps),
        residual is not None, scale, whole, rows, size, num_warps=_warps(rows * size),
    )  # fmt: skip
    return summed, y, rstd


@remembered
@triton.jit
def _norm_means_kernel(grad, x, rstd, weight, means, k, SIZE: tl.constexpr):
    """A row's mean of gradient · weight · normalised input."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((SIZE,), tl.float32)
    for start in range(0, k, SIZE):
        column = start + tl.arange(0, SIZE)
        upstream = tl.load(grad + row * k + column, mask=column < k, other=0.0).to(tl.float32)
        gain = tl.load(weight + column, mask=column < k, other=0.0).to(tl.float32)
        total += upstream * gain * tl.load(x + row * k + column, mask=column < k, other=0.0).to(tl.float32)
    tl.store(means + row, tl.sum(total, axis=0) * tl.load(rstd + row) / k)


@remembered
@triton.jit
def _norm_backward_kernel(
    grad, x, beside, rstd, weight, means, grad_x, grad_weight, m, k, ADD: tl.constexpr, WHOLE: tl.constexpr,
    ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Rows pid, pid + programs, …, or as many at a time as a program has: the gradient of their input, and the sum of
    their parts of the weight's.
    """
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
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
        if WHOLE:
            mean = tl.sum(scaled * unit, axis=1) / k
        else:
            mean = tl.load(means + row, mask=row < m, other=0.0)
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
    whole, size, rows = _shape(k)
    means, parts = rstd, pieces(k, size)
    if not whole:
        means = torch.empty_like(rstd)
        _norm_means_kernel[(m,)](grad, x, rstd, weight, means, k, PART, num_warps=8)
    programs = max(min(programs // parts, pieces(m, rows)), 1)
    grad_x = torch.empty_like(x)
    partial = torch.empty((programs, k), dtype=torch.float32, device=x.device)
    _norm_backward_kernel[programs, parts](
        grad, x, grad if beside is None else beside.contiguous(), rstd, weight, means, grad_x, partial, m, k,
        beside is not None, whole, rows, size, num_warps=warps or _warps(rows * size),
    )  # fmt: skip
    return grad_x, partial.sum(dim=0)
