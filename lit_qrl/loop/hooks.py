"""The hooks of reinforcement learning: Lightning's `Callback` with five more, and what they may ask of the learner."""

from collections.abc import Iterator
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from lit_qrl.loop.state import IterationState
from lit_qrl.objective import Objective
from lit_qrl.policy import CausalPolicy
from lit_qrl.rollout.engine import EngineDiedError
from lit_qrl.run.description import Described
from lit_qrl.types import AllReduce, Correction, LossContext, RolloutBatch, no_all_reduce


class Learner(Protocol):
    """What the loop and its callbacks may ask of the module that is trained."""

    policy: CausalPolicy
    objective: Objective
    iteration: IterationState

    @property
    def trainer(self) -> Any:
        """The Lightning Trainer."""
        ...

    @property
    def data(self) -> Any:
        """The data module, with the engine."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the learner's weights are."""
        ...

    @property
    def global_rank(self) -> int:
        """The number of this process."""
        ...

    @property
    def reduce(self) -> AllReduce:
        """How a tensor is reduced over all ranks."""
        ...

    def score(self, rollout: RolloutBatch, chunks: int = 1, routes: Tensor | None = None) -> Tensor:
        """Return the learner's log-probs "b t" of a rollout's completions, in the learner's own arithmetic.

        Args:
            rollout: the sequences.
            chunks: forward passes.
            routes: "b s layers k", into which the experts that its own routers choose are written.
        """
        ...


@runtime_checkable
class PreparesTrainer(Protocol):
    """A callback that sets the Trainer up for a run, before anything of it is used."""

    def prepare(self, trainer: Trainer, module: Any) -> None:
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

    def on_rollout_start(self, trainer: Trainer, module: "Learner", version: int) -> None:
        """Called before the weights of `version` are published."""

    def on_publish(self, trainer: Trainer, module: "Learner", name: str, tensor: Tensor) -> Tensor:
        """Return what the engine should get instead of the learner's clean, not yet quantized `tensor`."""
        return tensor

    def on_rollout_end(self, trainer: Trainer, module: "Learner", batch: RolloutBatch) -> None:
        """Called with the scored rollout of the iteration, before any mini-batch is cut."""

    def on_generation_end(self, trainer: Trainer, module: "Learner") -> None:
        """Called when the last completion of a rollout or an evaluation is drawn, before anything is scored."""

    def on_engine_died(self, trainer: Trainer, module: "Learner", error: EngineDiedError) -> bool:
        """Return True when the engine was built again and holds its weights, so that the same is drawn once more."""
        return False

    def correct(self, trainer: Trainer, module: "Learner", context: LossContext) -> Correction | None:
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


def corrected(trainer: Trainer) -> bool:
    """Return True when some callback looks at learner_old before the update."""
    return any(overrides(callback, "correct") for callback in rl_callbacks(trainer))
