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


def rotate_in_one_pass(network: nn.Module) -> None:
    """Let the library's modules of a network's families turn flat rows by the kernel.

    Args:
        network: a model; families whose embedding is another stay as they are.
    """
    for name in {type(part).__module__ for part in network.modules() if type(part).__name__ in ROTATED_BY_HALVES}:
        plain = getattr(sys.modules[name], FUNCTION)
        if not hasattr(plain, "__wrapped__"):
            setattr(sys.modules[name], FUNCTION, _one_pass(plain))


def _one_pass(plain: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    @wraps(plain)
    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        if unsqueeze_dim != 1 or not _in_kernel(q, k, cos, sin) or not (_flat(q, cos) and _flat(k, cos)):
            return plain(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        turns = cos.flatten(0, 1), sin.flatten(0, 1)
        flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k)]
        both = None if torch.is_grad_enabled() else _adjoining(*flat)
        turned: Any = [_Rotate.apply(x, *turns) for x in (flat if both is None else [both])]
        if both is not None:
            turned = turned[0].split([q.shape[1], k.shape[1]], 1)
        made = [x.unflatten(0, cos.shape[:2]).transpose(1, 2) for x in turned]
        return made[0], made[1]

    return rotated


def _adjoining(q: Tensor, k: Tensor) -> Tensor | None:
    """Return queries and keys, "n heads dim", as one tensor where the keys follow in memory, else None."""
    (n, heads, dim), one = q.shape, q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    follows = k.storage_offset() == q.storage_offset() + heads * dim
    if not one or not follows or q.stride() != k.stride() or q.stride()[1:] != (dim, 1):
        return None
    return q.as_strided((n, heads + k.shape[1], dim), q.stride())


def _flat(x: Tensor, cos: Tensor) -> bool:
    """Return whether `x` is "b heads n dim", of one row or of one token each, and every dimension of it is turned."""
    return x.ndim == 4 and cos.shape == (len(x), *x.shape[2:]) and 1 in cos.shape[:2] and x.shape[3] % 2 == 0


def _in_kernel(*tensors: Tensor) -> bool:
    first = tensors[0]
    same = all(one.dtype == first.dtype and not one.is_inference() for one in tensors)
    half = first.dtype in (torch.bfloat16, torch.float16)
    return same and half and dispatch.available(first, "rotary") and not torch.compiler.is_compiling()
