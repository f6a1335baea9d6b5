"""The end of a run that cannot go on: a checkpoint where that is safe, one event, and an error that names it."""

from typing import Any, NoReturn, Protocol, runtime_checkable

from lightning.pytorch import Trainer

from lit_qrl.errors import ConfigError, StoppedError
from lit_qrl.run.diary import event
from lit_qrl.run.folder import last_checkpoint


@runtime_checkable
class SavesBeforeUpdate(Protocol):
    """A callback that can write a checkpoint from which the iteration under way begins again."""

    def save_before_update(self, trainer: Trainer) -> None:
        """Save a run that stops in an iteration before its first update."""


def stop_run(
    trainer: Trainer, kind: str, message: str, *, save: bool = False, error: BaseException | None = None
) -> NoReturn:
    """End the run by a `StoppedError` that names its last checkpoint; the report is made on the way out.

    Memory that runs out before anything was learned is the configuration's: it does not fit.

    Args:
        trainer: the run's.
        kind: of the condition, for the diary.
        message: one sentence for a person.
        save: write a checkpoint first, of before this iteration, where the learner's state is good; one process does.
        error: the cause.

    Raises:
        ConfigError: for memory that has never sufficed.
        StoppedError: otherwise.
    """
    unfit = kind == "out_of_memory" and not has_learned(trainer)
    # Of several processes one alone cannot save: the others would have to take part.
    if save and trainer.world_size == 1 and not unfit:
        for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            if isinstance(callback, SavesBeforeUpdate):
                callback.save_before_update(trainer)
    saved = last_checkpoint(trainer.default_root_dir)
    where = f"The last good checkpoint is {saved}." if saved else "No checkpoint had been written."
    event(trainer, "stopped", f"{message} {where}", cause=kind)
    if unfit:
        raise ConfigError(f"The run does not fit. {message}") from error
    raise StoppedError(f"The run was stopped by the guard: {message} {where}") from error


def has_learned(trainer: Any) -> bool:
    """Return whether this start of a run has taken an optimizer step."""
    first = getattr(getattr(trainer, "lightning_module", None), "first_step", None)
    return first is not None and trainer.global_step > first
