"""Triton kernels of a sampler's step that hand on FP8 codes: a norm, or a gated activation, quantized in the same pass.

Decoding launches hundreds of kernels that each take a few microseconds, so that one launch less is worth more than the
memory it reads. Results are rounded where vLLM's own operators round, one after another; a norm's mean is summed in
another order. Import it only where Triton and a CUDA device are.
"""

# Kernels are compiled from their source and launched with arguments that their Python signature does not have.
# pyright: reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from lit_qrl.formats.kernels.tiles_triton import _half_scale, _inverse
from lit_qrl.formats.numerics import E4M3
from lit_qrl.functional._launch import Launch, pieces, power_of_2

GROUP = 128
WIDEST = 32768
"""The widest row that a program holds."""
CHUNK = 1024
"""Values of a program whose scales are of groups."""
PIECE = 4096
"""Values that a program reads at once of a row that has one scale."""
LEAST_OF_ROWS, LEAST_OF_GROUPS = 1.0 / (448.0 * 512.0), 1e-10 / 448.0
"""vLLM's smallest scales."""


@triton.jit
def _coded(values, LEAST: tl.constexpr):
    """What E4M3 rounds of 16-bit numbers "groups values", and a scale for each group."""
    scale = tl.maximum(_half_scale(tl.max(tl.abs(values), axis=1)), LEAST)
    high, rest = _inverse(scale, True)
    high = tl.broadcast_to(high[:, None], values.shape)
    return tl.fma(values, high, values * rest[:, None]), scale


@triton.jit(do_not_specialize=["across"])
def _norm_kernel(
    x, residual, weight, y, codes, scales, k, eps, across, ADD: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr,
    LEAST: tl.constexpr,
):  # fmt: skip
    """One row: the sum goes to where the residual stood."""
    row = tl.program_id(0).to(tl.int64)
    groups: tl.constexpr = SIZE // GROUP
    group = tl.arange(0, groups)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < k
    at = row * k + column
    dtype: tl.constexpr = x.dtype.element_ty
    wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        total = (wide + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        tl.store(residual + at, total, mask=inside)
        wide = total.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(tl.sum(wide * wide, axis=1), axis=0) / k + eps)
    scaled = (wide * inverse).to(dtype).to(tl.float32)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    made = (gain * scaled).to(dtype)
    tl.store(y + at, made, mask=inside)
    quotient, scale = _coded(made.to(tl.float32), LEAST)
    tl.store(codes + at, quotient.to(codes.dtype.element_ty), mask=inside)
    tl.store(scales + row + group * across, scale, mask=group * GROUP < k)


@triton.jit
def _gate(x, row, column, inside, k):
    """SiLU of the first half of a row, rounded, times the second."""
    dtype: tl.constexpr = x.dtype.element_ty
    at = x + row * 2 * k + column
    values = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + k, mask=inside, other=0.0).to(tl.float32)
    high, rest = _inverse(1.0 + libdevice.exp(-values), False)
    return (tl.fma(values, high, values * rest).to(dtype).to(tl.float32) * up).to(dtype)


@triton.jit(do_not_specialize=["across"])
def _gated_kernel(
    x, y, codes, scales, k, across, SIZE: tl.constexpr, GROUP: tl.constexpr, LEAST: tl.constexpr
):  # fmt: skip
    """A part of a row, of whole groups."""
    row = tl.program_id(0).to(tl.int64)
    groups: tl.constexpr = SIZE // GROUP
    group = tl.program_id(1) * groups + tl.arange(0, groups)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < k
    made = _gate(x, row, column, inside, k)
    at = row * k + column
    tl.store(y + at, made, mask=inside)
    quotient, scale = _coded(made.to(tl.float32), LEAST)
    tl.store(codes + at, quotient.to(codes.dtype.element_ty), mask=inside)
    tl.store(scales + row + group * across, scale, mask=group * GROUP < k)


@triton.jit
def _gated_row_kernel(x, y, codes, scales, k, SIZE: tl.constexpr, LEAST: tl.constexpr):
    """A row, piece by piece: first its values and the largest, then their codes."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, SIZE)
    largest = tl.zeros((SIZE,), tl.float32)
    for start in range(0, k, SIZE):
        column = start + place
        made = _gate(x, row, column, column < k, k)
        tl.store(y + row * k + column, made, mask=column < k)
        largest = tl.maximum(largest, tl.abs(made.to(tl.float32)))
    scale = tl.maximum(_half_scale(tl.max(largest, axis=0, keep_dims=True)), LEAST)
    high, rest = _inverse(scale, True)
    tl.debug_barrier()  # what follows reads what other threads may have written
    for start in range(0, k, SIZE):
        column = start + place
        values = tl.load(y + row * k + column, mask=column < k, other=0.0).to(tl.float32)
        quotient = tl.fma(values, tl.broadcast_to(high, values.shape), values * rest)
        tl.store(codes + row * k + column, quotient.to(codes.dtype.element_ty), mask=column < k)
    tl.store(scales + row + tl.arange(0, 1), scale)


_norm, _gated, _gated_row = Launch(_norm_kernel), Launch(_gated_kernel), Launch(_gated_row_kernel)
Coded = tuple[Tensor, Tensor, Tensor]


def _empty(x: Tensor, m: int, k: int, by_row: bool) -> Coded:
    scales = torch.empty((1 if by_row else k // GROUP, m), dtype=torch.float32, device=x.device)
    codes = torch.empty((m, k), dtype=E4M3, device=x.device)
    return torch.empty((m, k), dtype=x.dtype, device=x.device), codes, scales.t()


def norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, by_row: bool) -> Coded:
    """Return `weight · h / sqrt(mean h² + ε)` of h = x + residual, its codes and scales; h replaces the residual.

    Args:
        x: "m k", contiguous, bf16 or fp16.
        residual: "m k", contiguous; None stands for zeros, and nothing is written.
        weight: " k".
        eps: ε.
        by_row: whether a scale is of a row, "m 1", or of 128 values, "m k/128" column by column.
    """
    m, k = x.shape
    y, codes, scales = _empty(x, m, k, by_row)
    size = max(power_of_2(k), GROUP)
    _norm(
        (m,), (x, x if residual is None else residual, weight, y, codes, scales), (k, eps, m),
        (residual is not None, size, *((size, LEAST_OF_ROWS) if by_row else (GROUP, LEAST_OF_GROUPS))),
        num_warps=min(max(size // 512, 1), 16),
    )  # fmt: skip
    return y, codes, scales


def gated(x: Tensor, by_row: bool) -> Coded:
    """Return `SiLU(gate) · up`, its codes, and their scales.

    Args:
        x: "m 2k", contiguous, bf16 or fp16: gate and up side by side.
        by_row: whether a scale is of a row, "m 1", or of 128 values, "m k/128" column by column.
    """
    m, k = x.shape[0], x.shape[1] // 2
    y, codes, scales = _empty(x, m, k, by_row)
    if by_row:
        size = min(max(power_of_2(k), GROUP), PIECE)
        _gated_row((m,), (x, y, codes, scales), (k,), (size, LEAST_OF_ROWS), num_warps=max(size // 256, 1))
    else:
        constants = CHUNK, GROUP, LEAST_OF_GROUPS
        _gated((m, pieces(k, CHUNK)), (x, y, codes, scales), (k, m), constants, num_warps=2)
    return y, codes, scales
