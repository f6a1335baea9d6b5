"""Verifiable rewards."""

from lit_qrl.rewards.base import Reward, Sample, Scores, score_all
from lit_qrl.rewards.constant import ConstantReward
from lit_qrl.rewards.countdown import CountdownReward
from lit_qrl.rewards.episode import EpisodeReward
from lit_qrl.rewards.exact_match import ExactMatchReward
from lit_qrl.rewards.format import FormatReward
from lit_qrl.rewards.function import FunctionReward
from lit_qrl.rewards.math import MathReward
from lit_qrl.rewards.sudoku import SudokuReward

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
