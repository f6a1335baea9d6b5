"""Triton kernels of a decoding step: new keys and values go into the cache, and one query a row attends over it.

A row's keys are cut into parts, which are attended side by side and then weighed (flash-decoding), by the program that
ends last. Lengths lie on the device, so that a launch is the same for every length. Import it only where Triton and a
CUDA device are.
"""

# Kernels are compiled from their source and launched with arguments that their Python signature does not have.
# pyright: reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from lit_qrl.functional._launch import remembered

PART, LONG_PART, PARTS = 256, 1024, 64
"""Fewest keys of a part, of few rows and where rows alone keep a GPU busy, and most parts of a row."""
BUSY = 256
"""Heads of keys, of all rows, that do: about two for each of 132 multiprocessors."""
BLOCK = 32
"""Keys that a program reads at once."""


@remembered
@triton.jit
def _write_kernel(
    key, value, keys, values, last, key_row, key_head, value_row, value_head, keys_row, keys_head, keys_column,
    values_row, values_head, values_column, dim, value_dim, SIZE: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column, at = tl.load(last + row), tl.arange(0, SIZE)
    new = tl.load(key + row * key_row + head * key_head + at, mask=at < dim, other=0.0)
    tl.store(keys + row * keys_row + head * keys_head + column * keys_column + at, new, mask=at < dim)
    new = tl.load(value + row * value_row + head * value_head + at, mask=at < value_dim, other=0.0)
    tl.store(values + row * values_row + head * values_head + column * values_column + at, new, mask=at < value_dim)


def write(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, last: Tensor) -> None:
    """Write one column of each row into a cache in place.

    Args:
        key: "b key_heads d", the last dimension contiguous, as in all of these.
        value: "b key_heads dim".
        keys: "b key_heads n d".
        values: "b key_heads n dim".
        last: " b", the column of each row.
    """
    if key.stride(-1) != 1 or value.stride(-1) != 1:
        key, value = key.contiguous(), value.contiguous()
    size = triton.next_power_of_2(max(key.shape[-1], value.shape[-1]))
    _write_kernel[key.shape[:2]](
        key, value, keys, values, last, *key.stride()[:2], *value.stride()[:2], *keys.stride()[:3],
        *values.stride()[:3], key.shape[-1], value.shape[-1], size, num_warps=1,
    )  # fmt: skip


@remembered
@triton.jit
def _part_kernel(
    query, keys, values, last, parts, weight, ended, out, scale, groups, query_row, query_head, keys_row, keys_head,
    keys_column, values_row, values_head, values_column, dim, value_dim, part, ROWS: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The query heads of one key head over some of a row's keys: their output, with those of the row's other parts."""
    row, head, number = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    count = tl.load(last + row) + 1
    start = number * part
    if start < count:
        of, at, to = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, VALUE_DIM)
        heads = head * groups + of
        q = tl.load(
            query + row * query_row + heads[:, None] * query_head + at[None, :],
            mask=(of < groups)[:, None] & (at < dim)[None, :],
            other=0.0,
        )
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        sums = tl.zeros((ROWS, VALUE_DIM), tl.float32)
        keys += row * keys_row + head * keys_head
        values += row * values_row + head * values_head
        stop = tl.minimum(start + part, count)
        for first in range(start, stop, BLOCK):
            column = first + tl.arange(0, BLOCK)
            inside = column < stop
            k = tl.load(
                keys + column[None, :] * keys_column + at[:, None],
                mask=inside[None, :] & (at < dim)[:, None],
                other=0.0,
            )
            scores = tl.dot(q, k, input_precision="ieee") * scale
            scores = tl.where(inside[None, :], scores, float("-inf"))
            raised = tl.maximum(top, tl.max(scores, axis=1))
            shares, shrunk = tl.exp(scores - raised[:, None]), tl.exp(top - raised)
            v = tl.load(
                values + column[:, None] * values_column + to[None, :],
                mask=inside[:, None] & (to < value_dim)[None, :],
                other=0.0,
            )
            total = total * shrunk + tl.sum(shares, axis=1)
            sums = sums * shrunk[:, None] + tl.dot(shares.to(v.dtype), v, input_precision="ieee")
            top = raised
        used = (count + part - 1) // part
        inside = (of < groups)[:, None] & (to < value_dim)[None, :]
        first = (row * tl.num_programs(1) * groups + heads) * tl.num_programs(2)
        if used > 1:
            place = first + number
            tl.store(weight + place, top + tl.log(total), mask=of < groups)
            tl.store(parts + place[:, None] * value_dim + to[None, :], sums / total[:, None], mask=inside)
            tl.debug_barrier()  # all of this program's numbers are on their way before it counts as ended
            ended += row * tl.num_programs(1) + head
            number = tl.atomic_add(ended, 1, sem="acq_rel")
            if number == used - 1:  # the last of a row's programs adds the parts by their weights, in their order
                tl.debug_barrier()
                top = tl.full((ROWS,), float("-inf"), tl.float32)
                for other in range(used):
                    found = tl.load(weight + first + other, mask=of < groups, other=0.0, cache_modifier=".cg")
                    top = tl.maximum(top, found)
                total = tl.zeros((ROWS,), tl.float32)
                sums = tl.zeros((ROWS, VALUE_DIM), tl.float32)
                for other in range(used):
                    found = tl.load(weight + first + other, mask=of < groups, other=0.0, cache_modifier=".cg")
                    share = tl.exp(found - top)
                    held = parts + (first + other)[:, None] * value_dim + to[None, :]
                    total += share
                    sums += share[:, None] * tl.load(held, mask=inside, other=0.0, cache_modifier=".cg")
                tl.store(ended, 0)
        if number == used - 1:
            to_row = (row * tl.num_programs(1) * groups + heads)[:, None] * value_dim + to[None, :]
            tl.store(out + to_row, (sums / total[:, None]).to(out.dtype.element_ty), mask=inside)


@lru_cache
@torch.inference_mode(False)
def _ended(device: torch.device, heads: int) -> Tensor:
    # zeros that each call gives back as it found them: calls follow each other on one stream
    return torch.zeros(heads, dtype=torch.int32, device=device)


def attend(query: Tensor, keys: Tensor, values: Tensor, last: Tensor, scale: float | None = None) -> Tensor:
    """Return softmax(q Kᵀ · scale) V "b heads dim" over the columns 0 to `last` of each row.

    Args:
        query: "b heads d", the last dimension contiguous, as in all of these.
        keys: "b key_heads n d"; heads a multiple of key_heads.
        values: "b key_heads n dim".
        last: " b", integers.
        scale: factor of the scores; None is 1/√d.
    """
    b, heads, d = query.shape
    key_heads, n, dim = keys.shape[1], keys.shape[2], values.shape[3]
    if query.stride(-1) != 1:
        query = query.contiguous()
    part = max(LONG_PART if b * key_heads >= BUSY else PART, triton.next_power_of_2(triton.cdiv(n, PARTS)))
    count, groups = triton.cdiv(n, part), heads // key_heads
    parts = torch.empty(b, heads, count, dim, dtype=torch.float32, device=query.device)
    weights = torch.empty(b, heads, count, dtype=torch.float32, device=query.device)
    out = torch.empty(b, heads, dim, dtype=query.dtype, device=query.device)
    sizes = max(16, triton.next_power_of_2(d)), max(16, triton.next_power_of_2(dim))
    ended = _ended(query.device, triton.next_power_of_2(b * key_heads))
    _part_kernel[(b, key_heads, count)](
        query, keys, values, last, parts, weights, ended, out, d**-0.5 if scale is None else scale, groups,
        *query.stride()[:2], *keys.stride()[:3], *values.stride()[:3], d, dim, part,
        max(16, triton.next_power_of_2(groups)), *sizes, BLOCK, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out
