"""Verifiable rewards."""

from lit_qrl.rewards.base import Reward, Sample, Scores, score_all
from lit_qrl.rewards.function import FunctionReward
from lit_qrl.rewards.math import MathReward
from lit_qrl.rewards.puzzles import CountdownReward, SudokuReward
from lit_qrl.rewards.simple import ConstantReward, EpisodeReward, ExactMatchReward, FormatReward

__all__ = [
    "ConstantReward",
    "CountdownReward",
    "EpisodeReward",
    "ExactMatchReward",
    "FormatReward",
    "FunctionReward",
    "MathReward",
    "Reward",
    "Sample",
    "Scores",
    "SudokuReward",
    "score_all",
]
