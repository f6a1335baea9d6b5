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

from lit_qrl.formats.kernels.launch import Launch, pieces, power_of_2
from lit_qrl.formats.kernels.tiles_triton import _half_scale, _inverse
from lit_qrl.formats.numerics import E4M3

GROUP = 128
WIDEST = 32768
"""The widest row that a program holds."""
CHUNK = 1024
"""Values of a program whose scales are of groups."""
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
    dtype: tl.constexpr = x.dtype.element_ty
    values = tl.load(x + row * 2 * k + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * k + k + column, mask=inside, other=0.0).to(tl.float32)
    high, rest = _inverse(1.0 + libdevice.exp(-values), False)
    gate = tl.fma(values, high, values * rest).to(dtype).to(tl.float32)
    made = (gate * up).to(dtype)
    at = row * k + column
    tl.store(y + at, made, mask=inside)
    quotient, scale = _coded(made.to(tl.float32), LEAST)
    tl.store(codes + at, quotient.to(codes.dtype.element_ty), mask=inside)
    tl.store(scales + row + group * across, scale, mask=group * GROUP < k)


_norm, _gated = Launch(_norm_kernel), Launch(_gated_kernel)
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
    size = max(power_of_2(k), GROUP) if by_row else CHUNK
    _gated(
        (m, 1 if by_row else pieces(k, size)), (x, y, codes, scales), (k, m),
        (size, *((size, LEAST_OF_ROWS) if by_row else (GROUP, LEAST_OF_GROUPS))),
        num_warps=min(max(size // 1024, 2), 16),
    )  # fmt: skip
    return y, codes, scales
