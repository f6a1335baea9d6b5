"""What follows a publish or an engine that failed: once more, a new engine, or the end of the run."""

import traceback
from collections.abc import Callable
from typing import TypeVar

from lightning.pytorch import Trainer

from lit_qrl.errors import ConfigError, MemoryShortageError
from lit_qrl.precision.source import PublishingPrecision
from lit_qrl.receipts.ledger import PublishError
from lit_qrl.rollout.engine import EngineDiedError
from lit_qrl.run.event_log import event
from lit_qrl.run.stop import stop_run, stop_where_short

T = TypeVar("T")


class Restarts:
    """Counts the deaths of an engine since it last drew everything that it was asked for.

    Args:
        limit: deaths in a row after which the engine is built again; one more ends the run.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_a_row = 0

    def died(self, trainer: Trainer, error: EngineDiedError, together: bool = False) -> None:
        """Log the death and drop what the error keeps alive; stop the run when it was one too many.

        Args:
            trainer: of the run.
            error: of the engine.
            together: other processes hold the rest of the engine, so that this one cannot build it again.
        """
        self.in_a_row += 1
        again = self.in_a_row <= self.limit
        what = f"restart {self.in_a_row} of {self.limit}" if again else f"{self.limit} restarts did not help"
        plugin = trainer.precision_plugin
        if isinstance(plugin, PublishingPrecision) and plugin.share_weights:
            again, what = False, "the learner read the engine's own weights, so nothing is left to build it from"
        if together:
            again, what = False, "it was one with those of other processes, which this one cannot build again alone"
        event(trainer, "engine_died", f"{error} ({what})", restart=self.in_a_row, max_restarts=self.limit)
        if not again:
            stop_where_short(trainer, error, " in the engine", save=True)
            stop_run(trainer, "engine_died", f"{error} ({what}).", save=True, error=error)
        cause: BaseException | None = error
        while cause is not None:  # frames of the dead engine hold its memory
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__

    def reset(self) -> None:
        """Forget the deaths: all was drawn."""
        self.in_a_row = 0


def repeated(
    publish: Callable[[], T],
    trainer: Trainer,
    retries: int,
    forget: Callable[[], None],
    bury: Callable[[EngineDiedError], None],
) -> T:
    """Return what `publish` returns, after as many attempts as it takes.

    Args:
        publish: one attempt.
        trainer: whose diary gets an event for every fault.
        retries: attempts more after one that did not arrive as sent.
        forget: called after such an attempt, since nobody knows what arrived.
        bury: called when the engine died of it; the next attempt is to a new one, unless this raises.

    Raises:
        PublishError: of the last attempt.
        StoppedError: when memory ran out on the sender's side.
        ConfigError: of the first that raises one.
    """
    while True:
        try:
            return publish()
        except EngineDiedError as error:
            bury(error)
        except MemoryShortageError as error:
            stop_where_short(trainer, error, save=True)
        except (PublishError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            forget()
            faults = [fault.kind for fault in getattr(error, "faults", ())]
            event(trainer, "publish_fault", str(error), faults=faults)
            if not retries:
                raise
            retries -= 1
