"""The hooks of reinforcement learning: Lightning's `Callback` with six more; and what a run asks of Lightning's own.

What ends a run whose epochs are iterations must not cut one, and what `EarlyStopping` and `ModelCheckpoint` watch of
iterations is known at their ends.
"""

from collections.abc import Iterator
from typing import Any, Literal, Protocol, runtime_checkable

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from torch import Tensor

from lit_qrl.errors import ConfigError
from lit_qrl.loop.contracts import Learner
from lit_qrl.rollout.engine import EngineDiedError
from lit_qrl.run.description import Described
from lit_qrl.types import AllReduce, Correction, LossContext, RolloutBatch, no_all_reduce


@runtime_checkable
class PreparesTrainer(Protocol):
    """A callback that sets the Trainer up for a run, before anything of it is used."""

    def prepare(self, trainer: Trainer, module: Learner) -> None:
        """Change the Trainer's settings; no folder has been chosen and no logger has written yet."""


class RLCallback(Described, Callback):
    """Every hook is optional; a run with none of these callbacks is plain GRPO.

    A new estimator overrides `correct`:

    >>> import torch
    >>> class HalfWeight(RLCallback):
    ...     def correct(self, trainer, module, context):
    ...         return Correction(weights=torch.full_like(context.log_ratio, 0.5))
    """

    carries_ratio: bool = False
    """True when the weights hold the ratio learner_old / sampler; two such callbacks would square it."""
    takes_sequence_ratio: bool = False
    """True when it takes the product of a sequence's ratios, or their mean, for the ratio of its probabilities: so it
    is for autoregressive log-probs, not for the estimates of masked diffusion."""
    needs: Literal["sequence", "batch"] = "batch"
    """What `correct` looks at: `sequence` where the weights of a sequence depend on that sequence alone and nothing is
    rejected. With one update per rollout they are then taken from the training forward's own log-probs, as those of a
    whole batch are where that is one micro-batch."""
    needs_learner_old: bool = False
    """True when `on_rollout_end` reads learner_old's log-probs."""
    replays: Literal["rollout", "old"] | None = None
    """Whose choice of experts the learner's forward passes take instead of their own; see `loop.routing`."""
    shift_floor: float | None = None
    """The smallest ratio by which the shift of routers rescales that of an objective; None where it does not."""

    def on_rollout_start(self, trainer: Trainer, module: Learner, version: int) -> None:
        """Called before the weights of `version` are published."""

    def on_publish(self, trainer: Trainer, module: Learner, name: str, tensor: Tensor) -> Tensor:
        """Return what the engine should get instead of the learner's clean, not yet quantized `tensor`."""
        return tensor

    def on_rollout_end(self, trainer: Trainer, module: Learner, batch: RolloutBatch) -> None:
        """Called with the scored rollout of the iteration, before any mini-batch is cut."""

    def on_generation_end(self, trainer: Trainer, module: Learner) -> None:
        """Called when the last completion of a rollout or an evaluation is drawn, before anything is scored."""

    def on_engine_died(self, trainer: Trainer, module: Learner, error: EngineDiedError) -> bool:
        """Return True when the engine was built again and holds its weights, so that the same is drawn once more."""
        return False

    def correct(self, trainer: Trainer, module: Learner, context: LossContext) -> Correction | None:
        """Return weights and rejections, called once for every whole mini-batch.

        With `needs` = "sequence" and one update of several micro-batches per rollout it is called for each, on one rank
        alone, and once more on all sequences for its metrics.
        """
        return None


def rl_callbacks(trainer: Trainer) -> Iterator[RLCallback]:
    """Yield the trainer's callbacks that have the hooks of reinforcement learning."""
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(callback, RLCallback):
            yield callback


def overrides(callback: RLCallback, hook: str) -> bool:
    """Return whether a callback implements a hook itself.

    >>> overrides(RLCallback(), "correct")
    False
    """
    return getattr(type(callback), hook) is not getattr(RLCallback, hook)


def trainer_all_reduce(trainer: Trainer) -> AllReduce:
    """Return the `AllReduce` of the trainer's ranks, `no_all_reduce` itself where there is one rank."""
    if trainer.world_size == 1:
        return no_all_reduce

    def all_reduce(value: Tensor, op: Literal["sum", "max", "min"] = "sum") -> Tensor:
        # Lightning reduces in place, and what is reduced may be a view of what goes on to be used. NCCL takes what is
        # on its device alone, but metrics are kept where they come up.
        own: Any = value.to(trainer.strategy.root_device, copy=True)
        total: Any = trainer.strategy.reduce(own, reduce_op=op)  # pyright: ignore[reportArgumentType]
        return total.to(value.device)

    return all_reduce


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


def expect_metrics(trainer: Trainer, logged: bool, strict: dict[int, bool]) -> None:
    """Say whether the iteration that ends has metrics: the end that a resumed run repeats has none, and counts not.

    Args:
        trainer: of the run.
        logged: whether it has.
        strict: by the identity of each `EarlyStopping`, whether it was made to miss none; kept by the caller.
    """
    for callback in _stopping(trainer):
        callback.strict = strict.setdefault(id(callback), callback.strict) and logged


def _stopping(trainer: Trainer) -> Iterator[EarlyStopping]:
    return (one for one in trainer.callbacks if isinstance(one, EarlyStopping))  # pyright: ignore
