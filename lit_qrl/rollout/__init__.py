"""Engines that draw completions."""

from typing import TYPE_CHECKING

from lit_qrl.aliases import offering

if TYPE_CHECKING:
    from lit_qrl.rollout.diffusion.engine import DiffusionEngine
    from lit_qrl.rollout.embedded.engine import TransformersEngine
    from lit_qrl.rollout.engine import RolloutEngine
    from lit_qrl.rollout.vllm.client import RemoteVLLMEngine
    from lit_qrl.rollout.vllm.engine import VLLMEngine

__all__ = [
    "DiffusionEngine",
    "RemoteVLLMEngine",
    "RolloutEngine",
    "TransformersEngine",
    "VLLMEngine",
]
# What names vLLM's versions or patches loads no engine.
__getattr__ = offering(
    __name__,
    {
        "DiffusionEngine": "diffusion.engine",
        "RemoteVLLMEngine": "vllm.client",
        "RolloutEngine": "engine",
        "TransformersEngine": "embedded.engine",
        "VLLMEngine": "vllm.engine",
    },
)
