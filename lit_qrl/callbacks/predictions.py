"""Keeps what `predict` samples, one line per completion."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_qrl.loop.hooks import trainer_all_reduce
from lit_qrl.run.event_log import append_jsonl
from lit_qrl.run.folder import set_aside, shown

PREDICTIONS_FILE = "predictions.jsonl"
"""Name of the file in the run folder."""


class Predictions(Callback):
    """Writes the records of `predict_step` to `predictions.jsonl` in the run folder, and says where they are.

    The file of an earlier command is put aside as `predictions.1.jsonl`. Lightning's `BasePredictionWriter` asks the
    data loader for the samples' positions, which one without a sampler has not.
    """

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the file of an earlier command aside."""
        self._path = Path(trainer.default_root_dir) / PREDICTIONS_FILE
        self._sums = torch.zeros(4, dtype=torch.float64, device=pl_module.device)
        if trainer.is_global_zero and self._path.exists():
            set_aside(self._path)

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Sequence[dict[str, Any]],
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Append the records of every rank in turn."""
        for rank in range(trainer.world_size):
            if rank == trainer.global_rank:
                append_jsonl(self._path, outputs)
            trainer.strategy.barrier("predictions")
        rewards = [record["reward"] for record in outputs if record["reward"] is not None]
        correct = sum(record["correct"] for record in outputs)
        self._sums += torch.tensor(
            [len(outputs), len(rewards), sum(rewards), correct], dtype=torch.float64, device=pl_module.device
        )

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what was drawn and where it is."""
        count, scored, rewards, correct = trainer_all_reduce(trainer)(self._sums).tolist()
        if trainer.is_global_zero and count:
            what = f"{count:.0f} completions, mean reward {rewards / max(scored, 1):.3f}, {correct / count:.1%} correct"
            print(f"Predictions: {shown(self._path)} ({what})", flush=True)
