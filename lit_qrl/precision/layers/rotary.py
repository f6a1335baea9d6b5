"""Rotary position embeddings in one kernel for queries and one for keys, where the plain operations take some ten each.

The kernel computes in fp32 and rounds once, as vLLM does; the plain operations, which do it where it cannot run, round
each product too.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from lit_qrl.formats.kernels import dispatch
from lit_qrl.network.structure import ROTATED_BY_HALVES

FUNCTION = "apply_rotary_pos_emb"
"""Of the library's module of a model family."""


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        from lit_qrl.formats.kernels import rotary_triton

        ctx.save_for_backward(cos, sin)
        return rotary_triton.rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        from lit_qrl.formats.kernels import rotary_triton

        return rotary_triton.rotate(grads[0], *ctx.saved_tensors, back=True), None, None


def rotate_in_one_pass(network: nn.Module) -> list[str]:
    """Let the library's modules of a network's families turn flat rows by the kernel, and return those modules' names.

    Args:
        network: a model; families whose embedding is another stay as they are.
    """
    names = {type(part).__module__ for part in network.modules() if type(part).__name__ in ROTATED_BY_HALVES}
    for name in names:
        plain = getattr(sys.modules[name], FUNCTION)
        if not hasattr(plain, "__wrapped__"):
            setattr(sys.modules[name], FUNCTION, _one_pass(plain))
    return sorted(names)


def _one_pass(plain: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    @wraps(plain)
    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        known = unsqueeze_dim == 1 and _in_kernel(q, k, cos, sin)
        if known and _single(q, cos) and _single(k, cos):
            alone: list[Any] = [_Rotate.apply(x.squeeze(2), cos[:, 0], sin[:, 0]) for x in (q, k)]
            return alone[0][:, :, None], alone[1][:, :, None]
        if not known or not _flat(q, cos) or not _flat(k, cos):
            return plain(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        turned: list[Any] = [_Rotate.apply(x.squeeze(0).transpose(0, 1), cos[0], sin[0]) for x in (q, k)]
        return turned[0].transpose(0, 1)[None], turned[1].transpose(0, 1)[None]

    return rotated


def _flat(x: Tensor, cos: Tensor) -> bool:
    """Return whether `x` is "1 heads n dim" and every dimension of it is turned."""
    return x.ndim == 4 and cos.shape == (1, x.shape[2], x.shape[3]) and len(x) == 1 and x.shape[3] % 2 == 0


def _single(x: Tensor, cos: Tensor) -> bool:
    """Return whether `x` is "b heads 1 dim" with a turn of its own for each row, and every dimension is turned."""
    return x.ndim == 4 and cos.shape == (len(x), 1, x.shape[3]) and x.shape[2] == 1 and x.shape[3] % 2 == 0


def _in_kernel(*tensors: Tensor) -> bool:
    first = tensors[0]
    same = all(one.dtype == first.dtype and not one.is_inference() for one in tensors)
    half = first.dtype in (torch.bfloat16, torch.float16)
    return same and half and dispatch.available(first, "rotary") and not torch.compiler.is_compiling()
