"""Attention of flat rows whose queries and keys are turned by the kernel that lays them out."""

from typing import Any

import torch
from torch import Tensor, nn

from lit_qrl.formats.kernels import dispatch
from lit_qrl.network.names import become
from lit_qrl.network.padding_free import ATTENTION, FlatBatch, attend_laid_out
from lit_qrl.network.structure import CACHE_ARGUMENTS, HEAD_NORMS, RMS_NORMS, ROTATED_BY_HALVES
from lit_qrl.precision.layers.one_pass import OnePassRMSNorm


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, flat: FlatBatch) -> Any:
        from lit_qrl.formats.kernels import turned_triton

        ctx.save_for_backward(cos, sin, flat.restored, flat.copies)
        return turned_triton.turned(q, k, v, cos, sin, flat.index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from lit_qrl.formats.kernels import turned_triton

        return *turned_triton.turned_back(grads, *ctx.saved_tensors), None, None, None  # pyright: ignore


class FlatAttention(nn.Module):
    """Over a class of attention of the library's own, which does what has no layout."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the attention's output "1 n h", and None; the arguments are the library's."""
        module: Any = self
        flat, turns = kwargs.get("flat_batch"), kwargs.get("position_embeddings")
        if args or flat is None or turns is None or not _known(module, hidden_states, turns, kwargs):
            return super().forward(hidden_states, *args, **kwargs)  # pyright: ignore
        heads = (*hidden_states.shape[:-1], -1, module.head_dim)
        q, k, v = (project(hidden_states).view(heads) for project in (module.q_proj, module.k_proj, module.v_proj))
        if hasattr(module, HEAD_NORMS[0]):
            q, k = module.q_norm(q), module.k_norm(k)
        # squeezed, not indexed: the gradient of an index is a tensor of zeros and a copy
        rows: Any = _Turned.apply(q.squeeze(0), k.squeeze(0), v.squeeze(0), turns[0][0], turns[1][0], flat)
        out = attend_laid_out(rows, flat, module.scaling)
        return module.o_proj(out.flatten(1)[None]), None


def _known(module: Any, x: Tensor, turns: tuple[Tensor, Tensor], kwargs: dict[str, Any]) -> bool:
    """Return whether queries and keys are turned whole and by halves, and the kernel can run on them."""
    cached = any(kwargs.get(name) is not None for name in CACHE_ARGUMENTS)
    if cached or module.config._attn_implementation != ATTENTION:
        return False
    cos, sin = turns
    if torch.compiler.is_compiling() or x.is_inference() or len(x) != 1 or not dispatch.available(x, "turned"):
        return False
    half = x.dtype in (torch.bfloat16, torch.float16) and cos.dtype == sin.dtype == x.dtype
    return half and cos.shape == (*x.shape[:2], module.head_dim) and module.head_dim % 2 == 0


def turn_while_laid_out(network: nn.Module) -> None:
    """Let the attention of known families be `FlatAttention`, in place.

    Norms of heads take one kernel.

    Args:
        network: a model; whatever is not known stays as it is.
    """
    for part in list(network.modules()):
        if type(part).__name__ in ROTATED_BY_HALVES:
            for name in HEAD_NORMS:
                norm = getattr(part, name, None)
                if type(norm).__name__ in RMS_NORMS:
                    setattr(part, name, OnePassRMSNorm(norm, columns=False, codes=""))
            become(part, FlatAttention)
