"""A Triton kernel that turns queries or keys by their positions in one pass, forth and back.

Import it only where Triton and a CUDA device are.
"""

# Kernels are compiled from their source and launched with arguments that their Python signature does not have.
# pyright: reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from lit_qrl.formats.kernels.turned_triton import _turn
from lit_qrl.functional._launch import pieces, power_of_2, remembered

HEADS = 4
"""Heads that a program turns at once."""


@remembered
@triton.jit
def _rotate_kernel(
    x, cos, sin, out, heads, row_stride, head_stride, out_row_stride, out_head_stride, HALF: tl.constexpr,
    SIZE: tl.constexpr, HEADS: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Both halves of some heads of one token, computed in fp32 and rounded once, as vLLM's kernel does.

    What a program writes it alone has read, so that `out` may be `x`.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, SIZE)
    inside = (head < heads)[:, None] & (column < HALF)[None, :]
    dtype = out.dtype.element_ty
    at = x + token * row_stride + head[:, None] * head_stride + column[None, :]
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    cos += token * 2 * HALF
    sin += token * 2 * HALF
    first, second = _turn(first, second, cos, sin, HALF, column, column < HALF, dtype, BACK)
    to = out + token * out_row_stride + head[:, None] * out_head_stride + column[None, :]
    tl.store(to, first, mask=inside)
    tl.store(to + HALF, second, mask=inside)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, back: bool = False, in_place: bool = False) -> Tensor:
    """Return `x cos + rotate_half(x) sin`, or with `back` the gradient of `x` for that of the result: "n heads dim".

    Args:
        x: "n heads dim", the last dimension contiguous where it is written over.
        cos: "n dim".
        sin: "n dim".
        back: apply the transpose.
        in_place: write over `x` and return it.
    """
    n, heads, dim = x.shape
    if x.stride(-1) != 1:
        if in_place:
            raise ValueError(f"x is written over, and its last dimension has a stride of {x.stride(-1)}. Expected: 1.")
        x = x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    out = x if in_place else torch.empty((n, heads, dim), dtype=x.dtype, device=x.device)
    half = dim // 2
    _rotate_kernel[n, pieces(heads, HEADS)](
        x, cos, sin, out, heads, *x.stride()[:2], *out.stride()[:2], half, power_of_2(half), HEADS, back, num_warps=2,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out
