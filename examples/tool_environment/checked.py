"""Countdown with a calculator: the policy proposes an expression, sees its value, and may propose another."""

from lit_qrl.data.environment import MultiTurnTask
from lit_qrl.data.tasks import Countdown
from lit_qrl.rewards.puzzles import evaluate


class CheckedCountdown(MultiTurnTask):
    """Three-number Countdown in turns; the score is 1 when the last expression is right.

    Args:
        train_size: problems to train on.
        evaluation_size: held-out problems.
        max_turns: expressions that may be proposed.
        seed: of the problems.
    """

    name = "checked_countdown"

    def __init__(self, train_size: int = 8192, evaluation_size: int = 500, max_turns: int = 2, seed: int = 0) -> None:
        super().__init__(max_turns=max_turns)
        self.problems = Countdown(train_size=train_size, evaluation_size=evaluation_size, seed=seed)

    def train_rows(self):
        return self.problems.train_rows()

    def evaluation_rows(self):
        return self.problems.evaluation_rows()

    def prompt(self, row):
        return self.problems.prompt(row)

    def start(self, row):
        return {"row": row, "right": False}

    def reply(self, state, answer):
        row, found = state["row"], evaluate(answer)
        value, numbers = (None, []) if found is None else found
        state["right"] = value == row["target"] and sorted(numbers) == sorted(row["numbers"])
        if state["right"]:
            return None
        shown = "" if value is None else f"={value}"
        return f"{shown} {self.prompt(row)}"

    def finish(self, state):
        return float(state["right"])
