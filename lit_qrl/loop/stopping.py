"""Lightning's `EarlyStopping` in a run whose epochs are iterations: what it watches is known at their ends."""

from collections.abc import Iterator

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping

EVALUATED = "val/"
"""Metrics of an evaluation begin so; all others are of an iteration."""


def follow_iterations(trainer: Trainer) -> None:
    """Let what watches a metric of iterations look at the end of each.

    Left to itself it looks at the end of evaluations wherever they are less frequent, the one before the first
    iteration included, when there is no such metric.
    """
    for callback in _stopping(trainer):
        if not str(callback.monitor).startswith(EVALUATED):
            callback._check_on_train_epoch_end = True


def expect_metrics(trainer: Trainer, logged: bool) -> None:
    """Say whether the iteration that ends has metrics: the end that a resumed run repeats has none, and counts not."""
    for callback in _stopping(trainer):
        strict = vars(callback).setdefault("strict_as_given", callback.strict)
        callback.strict = strict and logged


def _stopping(trainer: Trainer) -> Iterator[EarlyStopping]:
    return (one for one in trainer.callbacks if isinstance(one, EarlyStopping))  # pyright: ignore
