"""Saves the run in one fixed place, atomically, in the background, as often as costs little."""

import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint

from lit_qrl.errors import ConfigError
from lit_qrl.run.checkpoint_files import CheckpointFiles, read_checkpoint, staging, whole_checkpoints
from lit_qrl.run.description import Described
from lit_qrl.run.folder import check_place, last_checkpoint, shown
from lit_qrl.run.interrupt import Interrupted, InterruptedTogether, Interruption, deadline
from lit_qrl.strategies.peers import Peers

if TYPE_CHECKING:
    from lit_qrl.module import GRPOModule

SHARE = 0.02
"""Of the wall time, what saves under `auto` may keep the run waiting."""
PATIENCE = 1.0
"""Seconds after which the end of a run says what it waits for."""


class RunCheckpoint(Described, Checkpoint):
    """Writes `<run folder>/checkpoints/last.ckpt` at the end of iterations and of the run.

    Only what is trained is saved: the frozen base under an adapter is had again from where it came from. The run waits
    for a copy to the host's memory; the file is written in the background, beside its place, forced to the disk and
    moved there, so that an interruption leaves the previous one whole.

    Beside the weights it holds which model they are of, optimizers with the low bits of 16-bit weights' masters,
    Lightning's loops, the position in the prompts with rollouts that were drawn ahead and how old their weights were,
    the budget of micro-batches, the publisher's version and the probe's baseline, the last evaluation, and each
    callback's own (stage and σ of AQN, counts of the guard). It holds no state of a random generator:
    draws follow from position, iteration and `data.base_seed`.

    Args:
        every_n_iterations: iterations between saves; `auto` saves as often as keeps their cost under 2 % of the wall
            time, 0 at the end of the run only.
        keep_every: also keep a numbered copy every so many iterations; 0 keeps none.
    """

    def __init__(self, every_n_iterations: int | Literal["auto"] = "auto", keep_every: int = 0) -> None:
        negative = not isinstance(every_n_iterations, str) and every_n_iterations < 0
        if negative or keep_every < 0:
            raise ConfigError(
                "checkpoint.every_n_iterations and checkpoint.keep_every count iterations.", expected=">= 0"
            )
        self.every_n_iterations, self.keep_every = every_n_iterations, keep_every
        self._files, self._interruption = CheckpointFiles(), Interruption()
        self._next = 0.0
        """When a save is due again under `auto`."""
        self._saved = self._loaded = -1
        self._requeueing: Any = None

    def setup(self, trainer: Trainer, pl_module: "GRPOModule", stage: str) -> None:
        """Refuse a folder that cannot be written, before anything is computed."""
        self._requeueing = ends_where_requeued()
        if stage == "fit":
            check_place(Path(trainer.default_root_dir) / "checkpoints")

    def on_train_start(self, trainer: Trainer, pl_module: "GRPOModule") -> None:
        """Take over Ctrl-C and SIGTERM."""
        self._loaded = trainer.global_step if trainer.ckpt_path is not None else -1
        together = trainer.world_size > 1
        for peers in (one for one in trainer.callbacks if isinstance(one, Peers)):  # pyright: ignore
            self._interruption.install(together, peers.tell_signal)
            peers.on_signal = self._interruption.pass_on
        self._interruption.install(together)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: "GRPOModule") -> None:
        """Stop all processes before the publish, where one of them was told to."""
        self.end_together(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: "GRPOModule", batch: Any, batch_idx: int) -> None:
        """Put a signal off from the first update to the end of the iteration: between them nothing can be saved."""
        if batch_idx == 0:
            self.end_together(trainer, pl_module)
        self._interruption.defer()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: "GRPOModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Leave out the evaluation of a run that is to end."""
        if trainer.is_last_batch and self._told(trainer, pl_module) is not None:
            trainer.limit_val_batches = 0

    def on_train_epoch_end(self, trainer: Trainer, pl_module: "GRPOModule") -> None:
        """Save when due, or when a signal ends the run."""
        deadline.arrived()
        iteration, ends = trainer.current_epoch + 1, _ends(trainer)
        kept = bool(self.keep_every) and iteration % self.keep_every == 0
        told = self._told(trainer, pl_module)
        if kept or ends or told is not None or self._due(trainer, iteration):
            began = time.perf_counter()
            with pl_module.iteration.timed("checkpoint"), _telling(trainer) if ends else nullcontext():
                self._save(trainer, f"iteration-{iteration}" if kept else None)
            ended = time.perf_counter()
            self._next = ended + (ended - began) / SHARE
        self._interruption.resume()
        self.end_together(trainer, pl_module)

    def _told(self, trainer: Trainer, module: "GRPOModule") -> int | None:
        """Return the number of the signal that ends the run, the same on all ranks: they have got it at other times."""
        pending = self._interruption.pending
        if trainer.world_size > 1:
            pending = int(module.reduce(torch.tensor(float(pending or 0)), "max")) or None
        return pending

    def cut(self) -> AbstractContextManager[None]:
        """Let a signal cut what one of several processes does by itself; see `Interruption.cut`."""
        return self._interruption.cut()

    def end_together(self, trainer: Trainer, module: "GRPOModule") -> None:
        """Save and raise on all ranks, where one of several has got a signal."""
        if trainer.world_size > 1 and (told := self._told(trainer, module)) is not None:
            self.save_before_update(trainer)
            self._files.wait()
            trainer.strategy.barrier("interrupted")  # what started them may end all with the first that ends
            raise InterruptedTogether(told)

    def _due(self, trainer: Trainer, iteration: int) -> bool:
        every = self.every_n_iterations
        if isinstance(every, str):
            # The clocks of ranks differ: the first one decides.
            return bool(trainer.strategy.broadcast(time.perf_counter() >= self._next))
        return every > 0 and iteration % every == 0

    def on_train_end(self, trainer: Trainer, pl_module: "GRPOModule") -> None:
        """Save the last iteration, if its end did not know that it is the last."""
        if self._saved != trainer.global_step:
            with _telling(trainer):
                self._save(trainer, None)

    def teardown(self, trainer: Trainer, pl_module: "GRPOModule", stage: str) -> None:
        """Wait for the last file; Lightning comes to this callback after those that save nothing."""
        if stage == "fit":
            with _telling(trainer):
                self._files.wait()
            self._interruption.remove()
        if self._requeueing is not None:
            signal.signal(signal.SIGUSR1, self._requeueing)

    def on_exception(self, trainer: Trainer, pl_module: "GRPOModule", exception: BaseException) -> None:
        """Save a run that a signal ended before the first update of an iteration, and finish what is being written."""
        self._interruption.remove()
        if isinstance(exception, Interrupted) and trainer.world_size == 1:  # one of several alone cannot save
            self.save_before_update(trainer)
        self._files.wait()
        if isinstance(exception, Interrupted):
            deadline.begin(exception.number)  # what is torn down may hold on to it too

    def save_before_update(self, trainer: Trainer) -> None:
        """Save a run that stops in an iteration before its first update, so that it begins that iteration again.

        Does nothing after the first update, or where the last checkpoint already holds this state.
        """
        loop = trainer.fit_loop  # pyright: ignore[reportAttributeAccessIssue]
        iterations: Any = loop.epoch_progress
        batches: Any = loop.epoch_loop.batch_progress
        begins = iterations.current.started < iterations.current.ready  # the batches are still those of the one before
        # Before its first iteration begins, what was loaded stands in the middle of Lightning's restart.
        if (
            trainer.global_step in (self._saved, self._loaded)
            or not trainer.training
            or not iterations.current.ready
            or (batches.current.started and not begins)
        ):
            return
        # Lightning would go on in the middle of the iteration, without its start and so without a publish.
        before = iterations.state_dict(), batches.state_dict()
        for count in (iterations.current, iterations.total):
            count.started = count.processed
        batches.total.ready = batches.total.started
        batches.reset_on_run()
        try:
            self._save(trainer, None)
        finally:
            iterations.load_state_dict(before[0])
            batches.load_state_dict(before[1])
        self._files.wait()

    def _save(self, trainer: Trainer, copy: str | None) -> None:
        if trainer.fast_dev_run:  # pyright: ignore[reportAttributeAccessIssue]
            return
        folder = Path(trainer.default_root_dir) / "checkpoints"
        folder.mkdir(parents=True, exist_ok=True)
        targets = [folder / f"{name}.ckpt" for name in ("last", *([copy] if copy else []))]
        before = trainer.strategy.checkpoint_io
        trainer.strategy.checkpoint_io = _StagedIO(self._files, targets)
        try:
            with staging():
                trainer.save_checkpoint(targets[0], weights_only=False)  # optimizer and loops too
        finally:
            trainer.strategy.checkpoint_io = before
        self._saved = trainer.global_step


@contextmanager
def _telling(trainer: Trainer) -> Iterator[None]:
    """Say what is waited for, where that takes long."""
    path = shown(Path(trainer.default_root_dir) / "checkpoints" / "last.ckpt")
    line = threading.Timer(PATIENCE, lambda: print(f"Writing the last iteration's checkpoint: {path}", flush=True))
    line.start()
    try:
        yield
    finally:
        line.cancel()


def _ends(trainer: Trainer) -> bool:
    """Return whether the iteration that ends is the last, as far as its end knows.

    It is saved then: at the end of the training `WeightAveraging` puts its average in place of what is trained.
    """
    iterations, epochs, steps = trainer.current_epoch + 1, trainer.max_epochs, trainer.max_steps
    reached = (epochs is not None and 0 <= epochs <= iterations) or 0 < steps <= trainer.global_step
    return bool(reached or trainer.should_stop)


def ends_where_requeued() -> Any:
    """Have SLURM's signal end the run as SIGTERM does; return the handler of before, None where SLURM runs nothing.

    Lightning, which leaves a handler in place, would save wherever it is and queue the job again: what is saved within
    an iteration does not go on as the run would have, and in a collective of several processes not at all.
    """
    if not SLURMEnvironment.detect():
        return None
    return signal.signal(signal.SIGUSR1, lambda number, frame: signal.raise_signal(signal.SIGTERM)) or signal.SIG_DFL


class _StagedIO(TorchCheckpointIO):
    """Hands what Lightning would write to the background."""

    def __init__(self, files: CheckpointFiles, targets: list[Path]) -> None:
        self.files, self.targets = files, targets

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.files.save(checkpoint, self.targets)


def iterations_of(checkpoint: Mapping[str, Any]) -> int:
    """Return how many whole iterations a checkpoint has behind it; 0 for one that does not say.

    >>> iterations_of({"loops": {"fit_loop": {"epoch_progress": {"current": {"completed": 2, "processed": 3}}}}})
    3
    """
    found: Any = checkpoint
    for name in ("loops", "fit_loop", "epoch_progress", "current", "processed"):  # at whose end it was written
        found = found.get(name, {})
    return found or 0


def all_iterations_had(checkpoint: Mapping[str, Any], iterations: int | None) -> str | None:
    """Return a sentence where a run that goes on has had all its iterations, else None.

    Args:
        checkpoint: of the run.
        iterations: `trainer.max_epochs`.

    Raises:
        ConfigError: where it has had more.
    """
    had = iterations_of(checkpoint)
    if iterations is None or iterations < 0 or had < iterations or not had:
        return None
    if had > iterations:
        raise ConfigError(
            f"The run has had {had} iterations already.",
            expected=f"trainer.max_epochs above {had}",
            given=iterations,
            remedy="Raise it; it counts those of before too.",
        )
    return f"The run has had its {had} iterations. To go on, raise trainer.max_epochs, which counts them too."


def resolve_checkpoint(requested: str | None, run_folder: str | Path, resume_if_possible: bool) -> str | None:
    """Return the checkpoint to restore: `last` is the run folder's own.

    Args:
        requested: a file, `last`, or None.
        run_folder: of the run.
        resume_if_possible: restore `last` where there is one and nothing else is requested; where it is damaged, the
            newest beside it that is whole.

    Raises:
        ConfigError: when the requested checkpoint does not exist, or is no whole checkpoint.
    """
    if requested is None and not resume_if_possible:
        return None
    if requested in (None, "last"):
        path = last_checkpoint(run_folder)
        if path is None and resume_if_possible:
            return None
        if path is None:
            raise ConfigError(
                "There is no checkpoint to resume from.",
                expected=f"{Path(run_folder) / 'checkpoints' / 'last.ckpt'}",
                remedy="Point trainer.default_root_dir to the run's folder, or start with --resume_if_possible true.",
            )
        requested = str(path)
    else:
        path, resume_if_possible = Path(requested), False
    if not path.is_file():
        inside = last_checkpoint(path)
        raise ConfigError(
            f"The checkpoint {'is a folder' if path.is_dir() else 'does not exist'}.",
            expected="a .ckpt file, or `last`, that of the newest run",
            given=requested,
            remedy=f"Set --ckpt_path {inside or 'last'}.",
        )
    try:
        read_checkpoint(path, "meta")
    except ConfigError as error:
        unread = isinstance(error.__cause__, OSError)  # it may be whole
        if unread or not (resume_if_possible and (whole := whole_checkpoints(path.parent))):
            raise
        return str(whole[0])
    return requested
