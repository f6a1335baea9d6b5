"""The engine of masked-diffusion models."""

from lit_qrl.rollout.diffusion.engine import DiffusionEngine

__all__ = ["DiffusionEngine"]
