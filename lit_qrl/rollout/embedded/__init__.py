"""The embedded engine: the model of transformers with a static cache and batched decoding."""

from lit_qrl.rollout.embedded.engine import TransformersEngine

__all__ = ["TransformersEngine"]
