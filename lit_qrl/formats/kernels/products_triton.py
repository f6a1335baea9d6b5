"""FP8 products of few rows, as a sampler decodes: y[m, n] = Σ_k s_a[m, k] · s_b[n/128, k] · Σ_i a · b with scales of
blocks, y[m, n] = s_a[m] · s_b[n] · Σ a · b with those of rows.

`k` counts blocks of 128 inputs, `i` the inputs of one; sums are in fp32. Import it only where Triton and a CUDA device
are.

Such a product waits for its weight, of which all multiprocessors must read at once: one that has fewer tiles than they
are is cut along its inputs too, and the program that ends last adds the parts, always in the same order. A tensor core
multiplies 64 rows at least of its first operand: of fewer rows of activations those are the weight's; of more they are
the activations', so that a thread needs the scales of two rows alone. Scales are read a step ahead, for a step takes as
long as memory answers otherwise.
"""

# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false
# Without Triton installed its decorator is unknown, and a kernel looks like a function that is indexed.

# Kernels are compiled from their source and launched with arguments that their Python signature does not have.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lit_qrl.functional._launch import pieces, power_of_2

BLOCK = 128
MOST_TILES = 2**16
"""Tiles of a result that is summed in parts, at most: each has a number of its own in memory that stays."""


class Plan(NamedTuple):
    """How a product is cut.

    Args:
        rows: of the activations that a program multiplies.
        columns: of the result, 64 or 128.
        parts: along the inputs.
        warps: of a program.
        stages: loads under way, in blocks of 128 inputs.
    """

    rows: int
    columns: int
    parts: int
    warps: int
    stages: int


@triton.jit(do_not_specialize=["m", "across", "parts"])  # or Triton compiles anew for numbers that 16 divides
def _product_kernel(
    a, scale_a, b, scale_b, bias, out, partial, ended, m, n, k, along, across, apart, parts,
    ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TURNED: tl.constexpr, CUT: tl.constexpr,
    BIASED: tl.constexpr,
):  # fmt: skip
    """`BM` rows and `BN` columns from one part of the inputs; `TURNED` has the weight as the first operand."""
    tile, part = tl.program_id(0), tl.program_id(1)
    bands = (m + BM - 1) // BM  # the programs that read the same weights are neighbours
    row = (tile % bands) * BM + tl.arange(0, BM)
    first = (tile // bands) * BN
    column = first + tl.arange(0, BN)
    kept = tl.minimum(row, m - 1)
    blocks = k // 128
    begin = part * blocks // parts
    end = (part + 1) * blocks // parts
    inner = begin * 128 + tl.arange(0, 128)
    rows = a + kept[:, None].to(tl.int64) * k + inner[None, :]
    weights = b + column[:, None].to(tl.int64) * k + inner[None, :]
    if TURNED:
        total = tl.zeros((BN, BM), tl.float32)
    else:
        total = tl.zeros((BM, BN), tl.float32)
    if ROWS:
        for _ in range(begin, end):
            if TURNED:
                total = tl.dot(tl.load(weights), tl.trans(tl.load(rows)), total)
            else:
                total = tl.dot(tl.load(rows), tl.trans(tl.load(weights)), total)
            rows += 128
            weights += 128
    else:
        row_scales = scale_a + kept * along + begin * across
        scales = scale_b + (first // 128) * apart + begin
        factor = tl.load(row_scales) * tl.load(scales)
        for block in range(begin, end):
            ahead = tl.where(block + 1 < end, 1, 0)  # the last step reads its own again
            row_scales += ahead * across
            scales += ahead
            next_rows, next_block = tl.load(row_scales), tl.load(scales)
            if TURNED:
                total += tl.dot(tl.load(weights), tl.trans(tl.load(rows))) * factor[None, :]
            else:
                total += tl.dot(tl.load(rows), tl.trans(tl.load(weights))) * factor[:, None]
            factor = next_rows * next_block
            rows += 128
            weights += 128
    if TURNED:
        place = row[None, :].to(tl.int64) * n + column[:, None]
        there = tl.broadcast_to((row < m)[None, :], (BN, BM))
    else:
        place = row[:, None].to(tl.int64) * n + column[None, :]
        there = tl.broadcast_to((row < m)[:, None], (BM, BN))
    last = True
    if CUT:
        tl.store(partial + part.to(tl.int64) * m * n + place, total, mask=there)
        tl.debug_barrier()  # all of this program's numbers are on their way before it counts as ended
        last = tl.atomic_add(ended + tile, 1, sem="acq_rel") == parts - 1
        if last:
            tl.debug_barrier()
            total = tl.zeros_like(total)
            other = partial + place
            for _ in range(parts):
                total += tl.load(other, mask=there, other=0.0, cache_modifier=".cg")
                other += m * n
            tl.store(ended + tile, 0)
    if last:
        if ROWS:
            of_rows, of_columns = tl.load(scale_a + kept * along), tl.load(scale_b + column)
            if TURNED:
                total = total * of_rows[None, :] * of_columns[:, None]
            else:
                total = total * of_rows[:, None] * of_columns[None, :]
        if BIASED:
            added = tl.load(bias + column).to(tl.float32)
            if TURNED:
                total += added[:, None]
            else:
                total += added[None, :]
        tl.store(out + place, total.to(out.dtype.element_ty), mask=there)


@lru_cache
@torch.inference_mode(False)
def _ended(device: torch.device) -> Tensor:
    # zeros that each product gives back as it found them: calls follow each other on one stream
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)


PROGRAMS = 400
"""Programs that a product is cut into where it can: about three for each of 132 multiprocessors."""


def plan(m: int, n: int, k: int, by_rows: bool = False) -> Plan:
    """Return how a product is cut: about as the fastest of 160 ways were on an H200 (`benchmarks/products.py`).

    Args:
        m: rows of activations.
        n: rows of the weight.
        k: its columns.
        by_rows: whether scales are of rows; steps wait for nothing then, so that parts may be longer.
    """
    rows = min(max(power_of_2(m), 16), 64)
    bands = pieces(m, rows)
    if by_rows and rows == 64:
        columns = BLOCK if bands * n // 64 > PROGRAMS // 2 else 64
        tiles = bands * (n // columns)
        parts = max(min(PROGRAMS // tiles, k // BLOCK // 17), 1)
        return Plan(rows, columns, parts, 4, 4 if parts > 1 else 5 if tiles < PROGRAMS // 2 else 3)
    wide = n // BLOCK >= PROGRAMS // 2 if rows < 64 else bands * n // 64 > PROGRAMS // 3
    columns = BLOCK if wide else 64
    tiles = bands * (n // columns)
    shortest = 7 if rows < 64 else 9  # blocks of a part, whose sum is written and read once more
    parts = max(min(round(PROGRAMS / tiles), k // BLOCK // shortest), 1)
    return Plan(rows, columns, parts, 4, 3)


def product(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    how: Plan | None = None,
) -> Tensor:
    """Return `(a · scale_a) @ (b · scale_b).T + bias`: "m n".

    Args:
        a: "m k", float8_e4m3fn.
        scale_a: "m k/128", fp32, in any order of its dimensions; or "m 1".
        b: "n k", float8_e4m3fn; both multiples of 128.
        scale_b: "n/128 k/128", fp32, row by row; or "n 1".
        bias: " n", or None.
        dtype: of the result.
        how: it is cut; None is as `plan` says.
    """
    (m, k), n = a.shape, b.shape[0]
    by_rows = len(scale_b) == n
    how = how or plan(m, n, k, by_rows)
    out = torch.empty((m, n), dtype=dtype, device=a.device)
    cut = how.parts > 1
    partial = torch.empty((how.parts, m, n), dtype=torch.float32, device=a.device) if cut else out
    tiles = pieces(m, how.rows) * (n // how.columns)
    _product_kernel[tiles, how.parts](
        a, scale_a, b, scale_b, out if bias is None else bias, out, partial, _ended(a.device), m, n, k,
        scale_a.stride(0), scale_a.stride(1), scale_b.stride(0), how.parts, by_rows, how.rows, how.columns,
        how.rows < 64, cut, bias is not None, num_warps=how.warps, num_stages=how.stages,
    )  # fmt: skip
    return out
