"""A callback that lets every layer be computed again from some iteration on, so that one run shows both."""

import lightning.pytorch as pl
import torch

from lit_qrl.network import memory


class RecomputeFrom(pl.Callback):
    """From an iteration on no layer keeps its activations, and what torch's allocator holds unused is given back.

    Args:
        iteration: the first such one, counted from 0.
    """

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Switch."""
        if trainer.current_epoch == self.iteration:
            memory.kept_layers = lambda **figures: 0
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
