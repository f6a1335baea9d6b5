"""Where callbacks and the module meet: Lightning's `Callback` with the hooks of reinforcement learning."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lightning.pytorch import Callback, Trainer
from torch import Tensor

from lit_qrl.types import Correction, LossContext, RolloutBatch

if TYPE_CHECKING:
    from lit_qrl.module import GRPOModule


class RLCallback(Callback):
    """Every hook is optional; a run with none of these callbacks is plain GRPO.

    A new estimator overrides `correct`:

    >>> import torch
    >>> class HalfWeight(RLCallback):
    ...     def correct(self, trainer, module, context):
    ...         return Correction(weights=torch.full_like(context.log_ratio, 0.5))
    """

    carries_ratio: bool = False
    """True when the weights hold the ratio learner_old / sampler; two such callbacks would square it."""

    def on_rollout_start(self, trainer: Trainer, module: "GRPOModule", version: int) -> None:
        """Called before the weights of `version` are published."""

    def on_publish(self, trainer: Trainer, module: "GRPOModule", name: str, tensor: Tensor) -> Tensor:
        """Return what the engine should get instead of the learner's clean, not yet quantized `tensor`."""
        return tensor

    def on_rollout_end(self, trainer: Trainer, module: "GRPOModule", batch: RolloutBatch) -> None:
        """Called with the scored rollout of the iteration, before any mini-batch is cut."""

    def correct(self, trainer: Trainer, module: "GRPOModule", context: LossContext) -> Correction | None:
        """Return weights and rejections for one whole mini-batch; called once per mini-batch."""
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


