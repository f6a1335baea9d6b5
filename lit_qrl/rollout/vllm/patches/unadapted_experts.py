"""An engine with room for an adapter takes the kernels of experts that multiply adapters of experts, too.

Adapters of ours are of attention and of dense and shared-expert layers, never of routed experts, and those kernels are
slower, and none is there on a CPU. The config of every layer of experts says that it has no adapter.
"""

from typing import Any

from lit_qrl.rollout.vllm.patches.patch import Patch, Versions


def _without(original: Any) -> Any:
    def finish(config: Any) -> None:
        original(config)
        config.is_lora_enabled = False

    return finish


_CONFIG = "vllm.model_executor.layers.fused_moe.config:FusedMoEConfig"
PATCH = Patch(
    __name__,
    Versions("0.26"),
    "vLLM asks which layers adapters change before it chooses kernels for experts",
    {f"{_CONFIG}.__post_init__": _without},
    [f"{_CONFIG}.is_lora_enabled"],
)
