"""Engines that draw completions."""

from lit_qrl.rollout.transformers import TransformersEngine

__all__ = ["TransformersEngine"]
