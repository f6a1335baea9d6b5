"""Answers to mathematical questions: read from a completion, brought to one form, compared."""

from lit_qrl.rewards.math.reward import MathReward

__all__ = ["MathReward"]
