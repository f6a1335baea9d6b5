"""Triton kernels that turn queries and keys by their positions while they lay out rows; import only where Triton is.

    q'[m] = turn(q[i_m], position of i_m),  k' alike,  v'[m] = v[i_m]

and back: the gradients of a token's copies are summed in fp32, in order, rounded, and turned back. Each number is read
and written once, and the gradients of queries, keys and values lie side by side, as the product before them reads them.
"""

# Kernels are compiled from their source and launched with arguments that their Python signature does not have.
# pyright: reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

import triton
import triton.language as tl
from torch import Tensor

from lit_qrl.functional._launch import power_of_2, remembered

HEADS, WARPS = 16, 4
"""Heads that a program has in its registers at once, absent ones among them, and its warps: 16 bytes a thread."""


@triton.jit
def _turn(first, second, cos, sin, HALF: tl.constexpr, column, inside, dtype: tl.constexpr, BACK: tl.constexpr):
    """Both halves in fp32, rounded once, as vLLM's kernel rounds them; the library's operations round products too."""
    cos_first = tl.load(cos + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    cos_second = tl.load(cos + HALF + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_first = tl.load(sin + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_second = tl.load(sin + HALF + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if BACK:  # the transpose: what each half gave to the other comes back
        one, other = first * cos_first + second * sin_second, second * cos_second - first * sin_first
    else:
        one, other = first * cos_first - second * sin_first, second * cos_second + first * sin_second
    return one.to(dtype), other.to(dtype)


@triton.jit
def _turned_heads(
    x, cos, sin, out, heads, HALF: tl.constexpr, SIZE: tl.constexpr, HEADS: tl.constexpr, TURNS: tl.constexpr
):  # fmt: skip
    """All heads of a row of `x`, turned or as they are."""
    column = tl.arange(0, SIZE)
    dtype: tl.constexpr = out.dtype.element_ty
    for start in range(0, heads, HEADS):
        head = start + tl.arange(0, HEADS)
        inside = (head < heads)[:, None] & (column < HALF)[None, :]
        at = head[:, None] * (2 * HALF) + column[None, :]
        first = tl.load(x + at, mask=inside, other=0.0)
        second = tl.load(x + at + HALF, mask=inside, other=0.0)
        if TURNS:
            first, second = _turn(
                first.to(tl.float32), second.to(tl.float32), cos, sin, HALF, column, column < HALF, dtype, False
            )
        tl.store(out + at, first, mask=inside)
        tl.store(out + at + HALF, second, mask=inside)


@remembered
@triton.jit
def _turned_kernel(
    q, k, v, cos, sin, index, to_q, to_k, to_v, heads, key_heads, q_stride, k_stride, v_stride, HALF: tl.constexpr,
    SIZE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """One row of the layout."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(index + row)
    cos += token * 2 * HALF
    sin += token * 2 * HALF
    width, key_width = heads * 2 * HALF, key_heads * 2 * HALF
    _turned_heads(q + token * q_stride, cos, sin, to_q + row * width, heads, HALF, SIZE, HEADS, True)
    _turned_heads(k + token * k_stride, cos, sin, to_k + row * key_width, key_heads, HALF, SIZE, HEADS, True)
    _turned_heads(v + token * v_stride, cos, sin, to_v + row * key_width, key_heads, HALF, SIZE, HEADS, False)


@triton.jit
def _returned_heads(
    grad, place, copies, cos, sin, out, row, shared, count, heads, HALF: tl.constexpr, SIZE: tl.constexpr,
    HEADS: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """All heads of one token's gradient: summed over its copies, or taken from where it is, and turned back."""
    column = tl.arange(0, SIZE)
    width = heads * 2 * HALF
    dtype: tl.constexpr = out.dtype.element_ty
    for start in range(0, heads, HEADS):
        head = start + tl.arange(0, HEADS)
        inside = (head < heads)[:, None] & (column < HALF)[None, :]
        at = head[:, None] * (2 * HALF) + column[None, :]
        first = tl.zeros((HEADS, SIZE), tl.float32)
        second = tl.zeros((HEADS, SIZE), tl.float32)
        if row < shared:
            for number in range(count):
                source = tl.load(copies + row * count + number)
                there = inside & (column < tl.where(source < 0, 0, HALF))[None, :]
                first += tl.load(grad + source * width + at, mask=there, other=0.0).to(tl.float32)
                second += tl.load(grad + source * width + at + HALF, mask=there, other=0.0).to(tl.float32)
        else:
            source = tl.load(place + row)
            first += tl.load(grad + source * width + at, mask=inside, other=0.0).to(tl.float32)
            second += tl.load(grad + source * width + at + HALF, mask=inside, other=0.0).to(tl.float32)
        of_first, of_second = first.to(dtype), second.to(dtype)
        if TURNS:
            of_first, of_second = _turn(
                of_first.to(tl.float32), of_second.to(tl.float32), cos, sin, HALF, column, column < HALF, dtype, True
            )
        tl.store(out + at, of_first, mask=inside)
        tl.store(out + at + HALF, of_second, mask=inside)


@remembered
@triton.jit(do_not_specialize=["shared", "count"])  # tokens: each number of them is the same kernel
def _turned_back_kernel(
    of_q, of_k, of_v, cos, sin, place, copies, out, heads, key_heads, shared, count, HALF: tl.constexpr,
    SIZE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """One token."""
    row = tl.program_id(0).to(tl.int64)
    cos += row * 2 * HALF
    sin += row * 2 * HALF
    width, key_width = heads * 2 * HALF, key_heads * 2 * HALF
    out += row * (width + 2 * key_width)
    _returned_heads(of_q, place, copies, cos, sin, out, row, shared, count, heads, HALF, SIZE, HEADS, True)
    out += width
    _returned_heads(of_k, place, copies, cos, sin, out, row, shared, count, key_heads, HALF, SIZE, HEADS, True)
    out += key_width
    _returned_heads(of_v, place, copies, cos, sin, out, row, shared, count, key_heads, HALF, SIZE, HEADS, False)


Three = tuple[Tensor, Tensor, Tensor]


def turned(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, index: Tensor) -> Three:
    """Return queries and keys turned, and values, as rows "m heads dim" of a layout.

    Args:
        q: "n heads dim"; a token's heads lie one behind another, as in the two others.
        k: "n key_heads dim".
        v: "n key_heads dim".
        cos: "n dim", contiguous, as `sin`.
        sin: "n dim".
        index: " m", int64, which token each row is.
    """
    q, k, v = (_rows(one) for one in (q, k, v))
    _, heads, dim = q.shape
    key_heads, half = k.shape[1], dim // 2
    made = tuple(one.new_empty(len(index), *one.shape[1:]) for one in (q, k, v))
    _turned_kernel[(len(index),)](
        q, k, v, cos.contiguous(), sin.contiguous(), index, *made, heads, key_heads, q.stride(0), k.stride(0),
        v.stride(0), half, power_of_2(half), HEADS, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return made  # pyright: ignore[reportReturnType]


def turned_back(grads: Three, cos: Tensor, sin: Tensor, place: Tensor, copies: Tensor) -> Three:
    """Return the gradients "n heads dim" of what `turned` was given, for those of its rows.

    Args:
        grads: of queries, keys and values, "m heads dim" each.
        cos: "n dim", contiguous, as `sin`.
        sin: "n dim".
        place: " n", int64, which row is each token's.
        copies: "p count", int64, which rows are each of the first p tokens'; −1 is none.
    """
    of_q, of_k, of_v = (one.contiguous() for one in grads)
    (_, heads, dim), key_heads = of_q.shape, of_k.shape[1]
    out = of_q.new_empty(len(place), (heads + 2 * key_heads) * dim)
    _turned_back_kernel[(len(place),)](
        of_q, of_k, of_v, cos.contiguous(), sin.contiguous(), place, copies, out, heads, key_heads, *copies.shape,
        dim // 2, power_of_2(dim // 2), HEADS, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    parts = out.split([heads * dim, key_heads * dim, key_heads * dim], dim=1)
    return tuple(part.unflatten(1, (-1, dim)) for part in parts)  # pyright: ignore[reportReturnType]


def _rows(x: Tensor) -> Tensor:
    """Return "n heads dim" with each token's heads one behind another."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
