"""Watches how far sampler and learner disagree, each iteration, on the same masks as everything else."""

from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer

from lit_qrl.callbacks.base import RLCallback
from lit_qrl.functional.mismatch import mismatch_metrics

if TYPE_CHECKING:
    from lit_qrl.module import GRPOModule


class MismatchMonitor(RLCallback):
    """Logs `mismatch/*`: learner_old against sampler, over the whole rollout.

    It reads the rollout at the end of the iteration, so that learner_old may be the training forward's own log-probs
    when nothing else needs them earlier.

    Args:
        every_n_iterations: iterations between measurements.
    """

    def __init__(self, every_n_iterations: int = 1) -> None:
        self.every_n_iterations = every_n_iterations

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: "GRPOModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure the iteration's mismatch after its last update."""
        rollout = pl_module.rollout
        if (
            not trainer.is_last_batch
            or rollout is None
            or rollout.learner_old_logprobs is None
            or trainer.current_epoch % self.every_n_iterations
        ):
            return
        metrics = mismatch_metrics(
            rollout.learner_old_logprobs, rollout.sampler_logprobs, rollout.mask, all_reduce=pl_module.reduce
        )
        pl_module.iteration.update({f"mismatch/{name}": value for name, value in metrics.items()})
