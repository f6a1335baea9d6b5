"""What follows when the engine dies: one event, a count, and the end of the run when it keeps dying."""

import traceback

from lightning.pytorch import Trainer

from lit_qrl.callbacks.guard import event, stop_run
from lit_qrl.rollout.engine import EngineDiedError


class Restarts:
    """Counts the deaths of an engine since it last drew everything that it was asked for.

    Args:
        limit: deaths in a row after which the engine is built again; one more ends the run.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_a_row = 0

    def died(self, trainer: Trainer, error: EngineDiedError) -> None:
        """Log the death and drop what the error keeps alive; stop the run when it was one too many."""
        self.in_a_row += 1
        again = self.in_a_row <= self.limit
        what = f"restart {self.in_a_row} of {self.limit}" if again else f"{self.limit} restarts did not help"
        if getattr(trainer.precision_plugin, "share_weights", False):
            again, what = False, "the learner read the engine's own weights, so nothing is left to build it from"
        event(trainer, "engine_died", f"{error} ({what})", restart=self.in_a_row, max_restarts=self.limit)
        if not again:
            stop_run(trainer, "engine_died", f"{error} ({what}).", save=True, error=error)
        cause: BaseException | None = error
        while cause is not None:  # frames of the dead engine hold its memory
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__

    def reset(self) -> None:
        """Forget the deaths: all was drawn."""
        self.in_a_row = 0
