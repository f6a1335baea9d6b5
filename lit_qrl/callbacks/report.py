"""Keeps samples of what the policy writes, and makes the report when the run ends, however it ends."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_qrl.errors import ConfigError
from lit_qrl.loop.hooks import RLCallback, overrides, rl_callbacks
from lit_qrl.report import render
from lit_qrl.run.diary import SAMPLES_FILE, append_jsonl, log_event, number, read_jsonl
from lit_qrl.run.folder import set_aside
from lit_qrl.run.loggers import RunCSVLogger
from lit_qrl.types import RolloutBatch

if TYPE_CHECKING:
    from lit_qrl.module import GRPOModule

log = logging.getLogger(__name__)


class Report(RLCallback):
    """Writes `samples.jsonl`, the diary's beginning and end, and `report/index.html` in the run folder.

    The page is made at the end of `fit`, at an error and at an interrupt. It is made from files, so that one that
    cannot be made loses nothing: `lit-qrl report RUN_FOLDER` makes it again.

    Args:
        every_n_iterations: also make the report between iterations, every so many; 0 makes it at the end only.
        samples_per_iteration: completions kept of each rollout, spread evenly over its prompts.

    Raises:
        ConfigError: for a negative number.
    """

    def __init__(self, every_n_iterations: int = 0, samples_per_iteration: int = 4) -> None:
        for name, value in (
            ("every_n_iterations", every_n_iterations),
            ("samples_per_iteration", samples_per_iteration),
        ):
            if value < 0:
                raise ConfigError(f"report.{name} counts, so it cannot be negative.", expected="0 or more", given=value)
        self.every_n_iterations, self.samples_per_iteration = every_n_iterations, samples_per_iteration
        self._active = False
        self._ended = False

    # ----------------------------------------------------------------------------------------------------------- hooks

    def setup(self, trainer: Trainer, pl_module: "GRPOModule", stage: str) -> None:
        """See to it that `metrics.csv` is written, whatever logger was chosen."""
        self._active, self._ended = False, False
        wanted = stage == "fit" and not trainer.fast_dev_run  # pyright: ignore[reportAttributeAccessIssue]
        if wanted and trainer.loggers and not any(isinstance(one, RunCSVLogger) for one in trainer.loggers):
            trainer.loggers = [*trainer.loggers, RunCSVLogger(trainer.default_root_dir)]

    def on_train_start(self, trainer: Trainer, pl_module: "GRPOModule") -> None:
        """Open the diary; put the files of an earlier run aside, or go on with those of the resumed one."""
        if not trainer.is_global_zero or trainer.fast_dev_run:  # pyright: ignore[reportAttributeAccessIssue]
            return
        self._active = True
        folder = Path(trainer.default_root_dir)
        done = trainer.fit_loop.epoch_progress.current.processed  # pyright: ignore[reportAttributeAccessIssue]
        resumed = done > 0 or trainer.global_step > 0
        tables = [one for one in trainer.loggers if isinstance(one, RunCSVLogger)]
        if resumed:
            for table in tables:
                table.resume(epoch=done, step=trainer.global_step)
            _drop_samples(folder / SAMPLES_FILE, after=done)
        else:
            for table in tables:
                table.start_over()
            if (folder / SAMPLES_FILE).exists():
                set_aside(folder / SAMPLES_FILE)
        names = [type(callback).__name__ for callback in rl_callbacks(trainer) if overrides(callback, "correct")]
        message = f"Resumed after iteration {done}." if resumed else "Training started."
        self._log(
            trainer,
            "resume" if resumed else "start",
            message,
            iteration=done,
            corrections=names,
            device=_device(trainer),
            parameters=sum(parameter.numel() for parameter in pl_module.parameters()),
        )

    def on_rollout_end(self, trainer: Trainer, module: "GRPOModule", batch: RolloutBatch) -> None:
        """Keep a few samples."""
        if not self._active or not self.samples_per_iteration or len(batch) == 0:
            return
        try:
            samples = self._samples(trainer, module, batch)
            append_jsonl(Path(trainer.default_root_dir) / SAMPLES_FILE, samples)
        except OSError as error:
            log.warning("Samples could not be written: %s", error)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: "GRPOModule") -> None:
        """Make the report of the iterations so far, when due; the last one's metrics are logged by now."""
        done = trainer.current_epoch
        if self._active and self.every_n_iterations and done and done % self.every_n_iterations == 0:
            self._render(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: "GRPOModule") -> None:
        """Close the diary."""
        if self._active:
            self._log(trainer, "finish", "Training ended.", iteration=trainer.current_epoch)
            self._ended = True

    def on_exception(self, trainer: Trainer, pl_module: "GRPOModule", exception: BaseException) -> None:
        """Say in the diary what happened, and make the report of what there is."""
        if not self._active:
            return
        if not self._ended:
            interrupt = isinstance(exception, (KeyboardInterrupt, SIGTERMException))
            kind, what = ("interrupt", "Interrupted") if interrupt else ("exception", "Stopped by an error")
            text = f"{what}: {type(exception).__name__}: {exception}".removesuffix(": ")
            self._log(trainer, kind, text, iteration=trainer.current_epoch + 1)
        self._finish(trainer)

    def teardown(self, trainer: Trainer, pl_module: "GRPOModule", stage: str) -> None:
        """Make the report and say where it is."""
        if self._active:
            self._finish(trainer)

    # --------------------------------------------------------------------------------------------------------- details

    def _finish(self, trainer: Trainer) -> None:
        self._active = False
        index = self._render(trainer)
        if index is not None:
            print(f"Report: {index}", flush=True)

    def _render(self, trainer: Trainer) -> Path | None:
        folder = trainer.default_root_dir
        try:
            return render(folder)
        # Whatever is wrong with a plot must not cost the run its checkpoint or hide the error that ended it.
        except Exception as error:
            log.warning(
                "The report could not be made (%s: %s); the run's files are whole.", type(error).__name__, error
            )
            log.warning("Try again with: lit-qrl report %s", folder)
            self._log(trainer, "report", f"The report could not be made: {type(error).__name__}: {error}")
            return None

    @staticmethod
    def _log(trainer: Trainer, kind: str, message: str, **fields: Any) -> None:
        try:
            log_event(trainer.default_root_dir, kind, message, **fields)
        except OSError as error:
            log.warning("The diary could not be written: %s", error)

    def _samples(self, trainer: Trainer, module: "GRPOModule", batch: RolloutBatch) -> list[dict[str, Any]]:
        s, t = batch.tokens.shape[1], batch.mask.shape[1]
        count = min(self.samples_per_iteration, len(batch))
        decode = module.policy.decode
        samples = []
        for row in (i * len(batch) // count for i in range(count)):
            ids = batch.tokens[row].tolist()
            used = batch.mask[row].nonzero()
            unscored = bool(batch.rewards[row].isnan())  # whose tokens are masked
            end = t if unscored else int(used.max()) + 1 if len(used) else 0
            parts = {name: number(values[row]) for name, values in batch.reward_parts.items()}
            correct = parts.pop("correct", None)
            samples.append(
                {
                    "iteration": trainer.current_epoch + 1,
                    "version": int(batch.version[row]),
                    "prompt": decode(ids[s - t - int(batch.prompt_length[row]) : s - t]),
                    "completion": decode(ids[s - t : s - t + end]),
                    "reward": number(batch.rewards[row]),
                    "parts": parts,
                    "correct": None if correct is None else correct > 0,
                }
            )
        return samples


def _drop_samples(path: Path, after: int) -> None:
    """Drop the samples of iterations that a resumed run draws again."""
    if not path.exists():
        return
    samples = read_jsonl(path)
    kept = [sample for sample in samples if not isinstance(i := sample.get("iteration"), int) or i <= after]
    temporary = path.with_name(f".{path.name}.partial")
    temporary.unlink(missing_ok=True)
    temporary.touch()
    append_jsonl(temporary, kept)
    temporary.replace(path)


def _device(trainer: Trainer) -> str:
    device = trainer.strategy.root_device
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return name if trainer.world_size == 1 else f"{trainer.world_size} × {name}"
    return f"{torch.get_num_threads()} CPU threads"
