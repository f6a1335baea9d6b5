"""Engines that draw completions."""

from lit_qrl.rollout.diffusion.engine import DiffusionEngine
from lit_qrl.rollout.embedded.engine import TransformersEngine
from lit_qrl.rollout.engine import RolloutEngine
from lit_qrl.rollout.vllm.engine import VLLMEngine

__all__ = ["DiffusionEngine", "RolloutEngine", "TransformersEngine", "VLLMEngine"]
