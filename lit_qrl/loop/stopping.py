"""What ends a run whose epochs are iterations: limits of Lightning's that would cut one, and what watches a metric.

What `EarlyStopping` and `ModelCheckpoint` watch of iterations is known at their ends.
"""

from collections.abc import Iterator

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)

from lit_qrl.errors import ConfigError

EVALUATED = "val/"
"""Metrics of an evaluation begin so; all others are of an iteration."""

CANNOT_SERVE: dict[type[Callback], tuple[str, str]] = {
    GradientAccumulationScheduler: (
        "would take optimizer steps elsewhere than at the ends of mini-batches",
        "data.micro_batches cuts a mini-batch into passes, data.mini_batches an iteration into steps",
    ),
    StochasticWeightAveraging: (
        "copies the module before the policy's weights are loaded, so that it would average nothing",
        "EMAWeightAveraging and WeightAveraging average them",
    ),
}
"""Callbacks of Lightning that a run cannot have: why, and what there is instead."""


def check_limits(trainer: Trainer, steps: int) -> None:
    """Raise `ConfigError` for a limit of the Trainer that ends an iteration in its middle, or that it divides by.

    Callbacks that cannot serve a run are refused with them.

    A cut iteration has no metrics, and what it learned from is not what its loss was divided by.

    Args:
        trainer: of a fit.
        steps: optimizer steps of an iteration.
    """
    if trainer.fast_dev_run:  # pyright: ignore[reportAttributeAccessIssue]  # one batch of everything, of which nothing stays
        return
    if trainer.max_epochs == -1 and trainer.max_steps == -1:
        raise ConfigError(
            "The run has no number of iterations, which learning-rate schedules and the report follow.",
            expected="trainer.max_epochs",
            given=trainer.max_epochs,
            remedy="Set trainer.max_epochs; trainer.max_time may end the run before.",
        )
    if trainer.max_steps > 0 and trainer.max_steps % steps:
        raise ConfigError(
            "trainer.max_steps would end the run in the middle of an iteration.",
            expected=f"a multiple of its {steps} optimizer steps (data.passes × data.mini_batches), or nothing",
            given=trainer.max_steps,
            remedy=f"Set trainer.max_epochs to {-(-trainer.max_steps // steps)}, which counts iterations.",
        )
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        for kind, (wrong, instead) in CANNOT_SERVE.items():
            if isinstance(callback, kind):
                raise ConfigError(f"{kind.__name__} {wrong}.", remedy=f"Remove it from trainer.callbacks; {instead}.")
    batches = trainer.limit_train_batches
    if not (isinstance(batches, float) and batches == 1.0):
        raise ConfigError(
            "trainer.limit_train_batches, or overfit_batches, would leave a part of each iteration out.",
            expected="all micro-batches of what was drawn",
            given=batches,
            remedy="Leave it out; data.prompts_per_iteration makes iterations small, trainer.max_epochs runs short.",
        )
    every = trainer.check_val_every_n_epoch
    if every is not None and every < 1:
        raise ConfigError(
            "trainer.check_val_every_n_epoch is too small.",
            expected="at least 1",
            given=every,
            remedy="Set trainer.limit_val_batches to 0 for a run without evaluations.",
        )


def follow_iterations(trainer: Trainer) -> None:
    """Let what watches a metric of iterations look at the end of each.

    Left to itself it looks at the end of evaluations wherever they are less frequent, the one before the first
    iteration included, when there is no such metric, or that of the iteration before.
    """
    for callback in _stopping(trainer):
        if not str(callback.monitor).startswith(EVALUATED):
            callback._check_on_train_epoch_end = True
    for callback in trainer.callbacks:  # pyright: ignore
        if isinstance(callback, ModelCheckpoint) and not str(callback.monitor or EVALUATED).startswith(EVALUATED):
            callback._save_on_train_epoch_end = True


def expect_metrics(trainer: Trainer, logged: bool) -> None:
    """Say whether the iteration that ends has metrics: the end that a resumed run repeats has none, and counts not."""
    for callback in _stopping(trainer):
        strict = vars(callback).setdefault("strict_as_given", callback.strict)
        callback.strict = strict and logged


def _stopping(trainer: Trainer) -> Iterator[EarlyStopping]:
    return (one for one in trainer.callbacks if isinstance(one, EarlyStopping))  # pyright: ignore
