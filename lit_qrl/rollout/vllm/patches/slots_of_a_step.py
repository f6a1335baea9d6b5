"""vLLM asks four of its managers for memory for each decoded token, though fifteen of sixteen have some already.

A block holds the keys and values of 16 tokens. Where the next one's place is in a block that the request has, and does
not fill it, nothing is allocated, freed or remembered for other prompts, and vLLM's scheduler goes on at once: that is
half of what it does for a request in a step. Layers with a window or a state, proposed tokens and the first step of a
block stay with vLLM.
"""

from collections.abc import Callable
from typing import Any

from lit_qrl.rollout.vllm.patches.patch import Patch, Versions


def _at_once(original: Callable[..., Any]) -> Callable[..., Any]:
    def allocate_slots(self: Any, request: Any, num_new_tokens: int, *args: Any, **named: Any) -> Any:
        if num_new_tokens == 1 and not args and named == {"num_lookahead_tokens": 0}:
            managers = self.coordinator.single_type_managers
            if len(managers) == 1 and type(managers[0]).__name__ == "FullAttentionManager":
                computed, size = request.num_computed_tokens, managers[0].block_size
                held = managers[0].req_to_blocks.get(request.request_id, ())
                if 0 < computed % size < size - 1 and computed < len(held) * size:
                    return self.empty_kv_cache_blocks
        return original(self, request, num_new_tokens, *args, **named)

    return allocate_slots


PATCH = Patch(
    __name__,
    Versions("0.26"),
    "vLLM's scheduler does not go to its managers for a token whose block is there",
    {"vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots": _at_once},
    needs=(
        "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager",
        "vllm.v1.core.kv_cache_manager:KVCacheManager.__init__.empty_kv_cache_blocks",
    ),
)
