"""Engines that draw completions."""

from lit_qrl.rollout.engine import RolloutEngine
from lit_qrl.rollout.transformers import TransformersEngine
from lit_qrl.rollout.vllm import VLLMEngine

__all__ = ["RolloutEngine", "TransformersEngine", "VLLMEngine"]
