"""Triton kernels that turn low-bit weights into numbers and back; import it only where Triton and CUDA are.

The 4-bit formats store blocks of consecutive weights, so a weight is one flat row of blocks: each program reads,
computes and writes one contiguous piece, a thread eight codes (one int32) and eight numbers (16 bytes of bf16).
"""

# Kernels are compiled from their source and launched with arguments that their Python signature does not have.
# pyright: reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from lit_qrl.formats.kernels.fp8_triton import _greater, _low, _quotient, _weight_scale
from lit_qrl.formats.numerics import INT4_STEPS
from lit_qrl.functional._launch import pieces, remembered

INT4, FP4, NF4 = 0, 1, 2
# Words of eight codes that a program takes, and its warps: the fastest of what `benchmarks/low_bit.py` tries.
WORDS, WARPS = 512, 4
INT4_TILE, INT4_WARPS = 8192, 4
SCALED = 2048
"""Codes of a byte that a program takes, of one row."""
_STEPS = tl.constexpr(INT4_STEPS)
# Twice the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 of E2M1, four bits each, the first lowest.
_E2M1 = tl.constexpr(0x0C8643210)


@remembered
@triton.jit
def _values_kernel(
    packed, scales, divisor, table, out, words, per_divisor, KIND: tl.constexpr, E8M0: tl.constexpr,
    DIVIDED: tl.constexpr, PER_SCALE: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Codes times scales, rounded once: `PER_SCALE` words share a scale."""
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    inside = word < words
    codes = tl.load(packed + word, mask=inside)
    scale = tl.load(scales + word // PER_SCALE, mask=inside)
    if E8M0:
        exponent = scale.to(tl.int32)
        shifted = tl.where(exponent == 255, 0x7FC00000, exponent << 23)  # 255 is NaN
        scale = tl.where(exponent == 0, 1 << 22, shifted).to(tl.float32, bitcast=True)
    else:
        scale = scale.to(tl.float32)
    if DIVIDED:
        scale = tl.div_rn(scale, tl.load(divisor + word // per_divisor, mask=inside, other=1.0))
    place = tl.arange(0, 8)[None, :]
    if KIND == 2:  # NF4 has the first of two codes in the high half of a byte
        place = place ^ 1
    nibble = codes[:, None] >> (place * 4)
    if KIND == 0:
        value = ((nibble & 0xF) - 8).to(tl.float32)
    elif KIND == 1:
        # 2^22 has 0.5 as its last place: twice the magnitude or-ed into it, and 2^22 taken away again
        twice = ((tl.full(nibble.shape, _E2M1, tl.int64) >> ((nibble & 7) * 4)) & 0xF).to(tl.int32)
        value = (twice | 0x4A800000).to(tl.float32, bitcast=True) - 4194304.0
        value = (value.to(tl.int32, bitcast=True) | ((nibble & 8) << 28)).to(tl.float32, bitcast=True)
    else:
        value = tl.load(table + (nibble & 0xF))
    made = (value * scale[:, None]).to(out.dtype.element_ty)
    tl.store(out + word[:, None] * 8 + tl.arange(0, 8)[None, :], made, mask=inside[:, None])


def values(
    packed: Tensor,
    scales: Tensor,
    per_scale: int,
    kind: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    divisor: Tensor | None = None,
    table: Tensor | None = None,
    words: int = WORDS,
    warps: int = WARPS,
) -> Tensor:
    """Return the weight of `shape` (out, in) that packed 4-bit codes and their scales stand for.

    Args:
        packed: the codes, contiguous, eight in four bytes.
        scales: one per `per_scale` weights, in the order of the weights; uint8 holds exponents (E8M0).
        per_scale: weights that share a scale.
        kind: `INT4`, `FP4` or `NF4`: what a code means.
        shape: of the weight, or of a stack of them.
        dtype: of the weight.
        divisor: numbers that divide the scales, each those of as many weights.
        table: the 16 numbers of NF4.
        words: a program's share, in words of eight codes.
        warps: of a program.
    """
    flat = packed.contiguous().view(-1).view(torch.int32)
    out = torch.empty(shape, dtype=dtype, device=packed.device)
    count = flat.numel()
    each = count if divisor is None else max(count // divisor.numel(), 1)
    _values_kernel[(pieces(count, words),)](
        flat, scales.contiguous(), scales if divisor is None else divisor, scales if table is None else table, out,
        count, each, kind, scales.dtype == torch.uint8, divisor is not None, per_scale // 8, words, num_warps=warps,
    )  # fmt: skip
    return out


@remembered
@triton.jit
def _scaled_kernel(
    codes, scales, out, columns, down, across, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """A piece of a row: codes of a byte times their scales, rounded once; the strides of scales are down and across."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = column < columns
    place = row * columns + column
    value = tl.load(codes + place, mask=inside).to(tl.float32)
    scale = tl.load(scales + (row // ROWS) * down + (column // COLUMNS) * across, mask=inside)
    tl.store(out + place, (value * scale.to(tl.float32)).to(out.dtype.element_ty), mask=inside)


def scaled_values(codes: Tensor, scales: Tensor, dtype: torch.dtype, block: tuple[int, int]) -> Tensor:
    """Return the numbers that codes of a byte and their scales stand for.

    Args:
        codes: E4M3 or int8, "rows columns".
        scales: one for each block, rounded up, or one.
        dtype: of the numbers.
        block: rows and columns that share a scale.
    """
    codes = codes.contiguous()
    rows, columns = codes.shape
    if scales.numel() == 1:
        scales = scales.reshape(1, 1)
    down, across = (stride if size > 1 else 0 for stride, size in zip(scales.stride(), scales.shape, strict=True))
    # one kernel for scales of rows, however wide
    shared = [size if count > 1 else 1 for size, count in zip(block, scales.shape, strict=True)]
    out = torch.empty((rows, columns), dtype=dtype, device=codes.device)
    _scaled_kernel[rows, pieces(columns, SCALED)](
        codes, scales, out, columns, down, across, *shared, SCALED, num_warps=WARPS,
    )  # fmt: skip
    return out


@remembered
@triton.jit
def _int4_kernel(
    w, packed, scales, groups, eps, LOW: tl.constexpr, BF16: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """`ROWS` groups: amax, codes, and eight codes per int32."""
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    word = group[:, None] * (GROUP // 8) + tl.arange(0, GROUP // 8)[None, :]
    inside = group < groups
    values = tl.load(
        w + word[:, :, None] * 8 + tl.arange(0, 8)[None, None, :], mask=inside[:, None, None], other=0.0
    ).to(tl.float32)
    amax = tl.reduce(tl.reduce(tl.abs(values), 2, _greater), 1, _greater)
    scale = _weight_scale(amax, 1.0 / _STEPS, eps, w.dtype.element_ty)
    low = _low(scale, amax)
    divisor = scale[:, None, None]
    if BF16:
        # Two numbers of 8 digits: their quotient stays 2^-17 of itself away from where bf16 rounds up or down, so the
        # product with the inverse, a few 2^-24 off, rounds to the same, and no tie is left to be rounded to even.
        if low < 8.3e-25:  # inverses near inf: 2^80 on both sides changes no quotient
            larger = tl.where(divisor < 8.3e-25, 1.2089258196146292e24, 1.0)
            values, divisor = values * larger, divisor * larger
        quotient = values * tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)
        rounded = (quotient.to(tl.int32, bitcast=True) + 0x8000) & -0x10000
        quotient = rounded.to(tl.float32, bitcast=True)
    else:
        quotient = _quotient(values, divisor, low)
        if LOW:
            quotient = quotient.to(w.dtype.element_ty).to(tl.float32)
    quotient = tl.minimum(tl.maximum(quotient, -8.0), 7.0)
    # adding 1.5 · 2^23 + 8 rounds to the nearest integer, ties to even, and leaves it in the last bits
    codes = (quotient + 12582920.0).to(tl.int32, bitcast=True) & 0xF
    made = tl.sum(codes << (tl.arange(0, 8) * 4)[None, None, :], axis=2)
    tl.store(packed + word, made, mask=inside[:, None])
    tl.store(scales + group, scale.to(scales.dtype.element_ty), mask=inside)


def int4_groups(
    weight: Tensor, group_size: int, tile: int = INT4_TILE, warps: int = INT4_WARPS
) -> tuple[Tensor, Tensor]:
    """Return codes "n k/8" (eight per int32) and scales "n k/g" of a weight, as `Int4Group.quantize` makes them.

    Args:
        weight: "n k".
        group_size: a power of two that divides k.
        tile: weights that a program takes.
        warps: of a program.
    """
    weight = weight.contiguous()
    n, k = weight.shape
    packed = torch.empty((n, k // 8), dtype=torch.int32, device=weight.device)
    scales = torch.empty((n, k // group_size), dtype=weight.dtype, device=weight.device)
    rows = max(tile // group_size, 1)
    eps = torch.finfo(weight.dtype).eps
    _int4_kernel[(triton.cdiv(scales.numel(), rows),)](
        weight, packed, scales, scales.numel(), eps, weight.dtype != torch.float32, weight.dtype == torch.bfloat16,
        group_size, rows, num_warps=warps,
    )  # fmt: skip
    return packed, scales
