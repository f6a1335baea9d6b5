"""Saves the run in one fixed place, atomically, at the end of iterations."""

import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from lit_qrl.errors import ConfigError
from lit_qrl.run.folder import last_checkpoint


class RunCheckpoint(Checkpoint):
    """Writes `<run folder>/checkpoints/last.ckpt` at the end of every n-th iteration and of the run.

    The file is written beside its place and moved there, so that an interruption leaves the previous one whole.

    Args:
        every_n_iterations: iterations between saves; 0 saves at the end of the run only.
        keep_every: also keep a numbered copy every so many iterations; 0 keeps none.
    """

    def __init__(self, every_n_iterations: int = 1, keep_every: int = 0) -> None:
        if every_n_iterations < 0 or keep_every < 0:
            raise ConfigError(
                "checkpoint.every_n_iterations and checkpoint.keep_every count iterations.", expected=">= 0"
            )
        self.every_n_iterations, self.keep_every = every_n_iterations, keep_every
        self._saved = -1

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a folder that cannot be written, before anything is computed."""
        if stage != "fit":
            return
        folder = Path(trainer.default_root_dir) / "checkpoints"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / f".write-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                "The run folder cannot be written.",
                given=f"{trainer.default_root_dir} ({error.strerror or error})",
                remedy="Set trainer.default_root_dir to a folder that you may write to.",
            ) from error

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save when due."""
        iteration = trainer.current_epoch + 1
        if self.every_n_iterations and iteration % self.every_n_iterations == 0:
            self._save(
                trainer, f"iteration-{iteration}" if self.keep_every and iteration % self.keep_every == 0 else None
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last iteration, if that has not been done."""
        if self._saved != trainer.global_step:
            self._save(trainer, None)

    def save_before_update(self, trainer: Trainer) -> None:
        """Save a run that stops in an iteration before its first update, so that it begins that iteration again.

        Does nothing after the first update, or where the last checkpoint already holds this state.
        """
        loop = trainer.fit_loop  # pyright: ignore[reportAttributeAccessIssue]
        progress: Any = loop.epoch_progress
        if self._saved == trainer.global_step or not trainer.training or loop.epoch_loop.batch_progress.current.ready:
            return
        # Lightning would go on in the middle of the iteration, without its start and so without a publish.
        counts: list[Any] = [count for count in (progress.current, progress.total) if count.started]
        for count in counts:
            count.started -= 1
        try:
            self._save(trainer, None)
        finally:
            for count in counts:
                count.started += 1

    def _save(self, trainer: Trainer, copy: str | None) -> None:
        folder = Path(trainer.default_root_dir) / "checkpoints"
        if trainer.fast_dev_run:  # pyright: ignore[reportAttributeAccessIssue]
            return
        for target in ("last", *([copy] if copy else [])):
            partial = folder / f".{target}.partial"
            trainer.save_checkpoint(partial, weights_only=False)  # optimizer and loops too
            if trainer.is_global_zero:
                os.replace(partial, folder / f"{target}.ckpt")
        self._saved = trainer.global_step


def resolve_checkpoint(requested: str | None, run_folder: str | Path, resume_if_possible: bool) -> str | None:
    """Return the checkpoint to restore: `last` is the run folder's own.

    Raises:
        ConfigError: when the requested checkpoint does not exist or is no checkpoint.
    """
    if requested is None and not resume_if_possible:
        return None
    if requested in (None, "last"):
        found = last_checkpoint(run_folder)
        if found is None and not resume_if_possible:
            raise ConfigError(
                "There is no checkpoint to resume from.",
                expected=f"{Path(run_folder) / 'checkpoints' / 'last.ckpt'}",
                remedy="Point trainer.default_root_dir to the run's folder, or start with --resume_if_possible true.",
            )
        return str(found) if found else None
    path = Path(requested)
    if not path.is_file():
        raise ConfigError("The checkpoint does not exist.", given=requested, remedy="Check --ckpt_path.")
    try:
        torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except Exception as error:
        raise ConfigError(
            "The file is not a readable checkpoint.",
            given=f"{requested} ({type(error).__name__})",
            remedy="Check --ckpt_path.",
        ) from error
    return requested
