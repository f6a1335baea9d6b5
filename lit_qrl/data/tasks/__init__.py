"""The tasks that ship: rows, prompts and rewards of one problem set each."""

from lit_qrl.data.tasks.countdown import Countdown
from lit_qrl.data.tasks.dataset import DatasetTask
from lit_qrl.data.tasks.environment import Environment
from lit_qrl.data.tasks.mixture import Mixture
from lit_qrl.data.tasks.prefix_sum import PrefixSum
from lit_qrl.data.tasks.reasoning_gym import ReasoningGym
from lit_qrl.data.tasks.sudoku import Sudoku

__all__ = ["Countdown", "DatasetTask", "Environment", "Mixture", "PrefixSum", "ReasoningGym", "Sudoku"]
