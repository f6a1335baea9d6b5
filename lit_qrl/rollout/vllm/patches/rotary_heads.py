"""The CPU's rotary embedding turns the wrong numbers of queries "tokens heads dim", which latent attention has.

It takes the heads for tokens from the second one on. As "tokens heads·dim" it is right; here torch computes the former.
"""

from typing import Any

from torch import Tensor

from lit_qrl.rollout.vllm.patches.patch import Patch, Versions


def by_head(original: Any) -> Any:
    """Return the method, with vLLM's own formula in torch for queries that have their heads apart."""

    def forward_cpu(rotary: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        if query.ndim == positions.ndim + 1:
            return original(rotary, positions, query, key)
        return rotary.forward_native(positions, query, key)

    return forward_cpu


_CLASS = "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding"
PATCH = Patch(
    __name__,
    Versions("0.27"),
    "the CPU operator takes queries with their heads apart",
    {f"{_CLASS}.forward_cpu": by_head},
    [f"{_CLASS}.forward_native"],
    device="cpu",
)
