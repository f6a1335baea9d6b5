"""vLLM as a rollout engine."""

from lit_qrl.rollout.vllm.engine import VLLMEngine

__all__ = ["VLLMEngine"]
