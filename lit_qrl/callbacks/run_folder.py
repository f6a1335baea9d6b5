"""The folder of a run that Python code starts: its place, its lock and its `config.yaml`, as on the command line."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint, ModelSummary, RichModelSummary
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.trainer.states import TrainerFn

from lit_qrl.data.module import RolloutDataModule
from lit_qrl.errors import ConfigError
from lit_qrl.optim.build import described_optimizer
from lit_qrl.run import folder as folders
from lit_qrl.run.config import RunConfig
from lit_qrl.run.console import quiet
from lit_qrl.run.description import describe
from lit_qrl.run.folder import RunLock
from lit_qrl.run.interrupt import Interrupted, InterruptedTogether
from lit_qrl.run.loggers import RunCSVLogger
from lit_qrl.strategies.peers import Peers, trainer_settings

if TYPE_CHECKING:
    from lit_qrl.module import GRPOModule

SUMMARIES = (ModelSummary, RichModelSummary)
"""What a Trainer adds of its own accord; the configuration says more than they do."""


class RunFolder(Checkpoint):
    """Gives a run its folder; `default_callbacks` puts it last.

    It is a `Checkpoint` because Lightning calls those last: the lock is held until everything else is written.

    Args:
        name: of the runs under `runs/`, where the Trainer has no `default_root_dir`.
        groups: the callbacks that every run has, by the names that their settings have in a configuration.
    """

    def __init__(self, name: str = "run", groups: Mapping[str, type[Callback]] | None = None) -> None:
        self.name, self.groups = name, dict(groups or {})
        self._lock = RunLock()
        self._folder: Path | None = None
        self._trained: Path | None = None
        self._own: str | None = None
        self._other_loggers: list[Logger] | None = None

    def prepare(self, trainer: Trainer, module: "GRPOModule") -> None:
        """Choose the folder, and set the Trainer as a run needs it.

        Raises:
            ConfigError: without a `RolloutDataModule`, or for a folder that cannot be written.
        """
        data = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        if not isinstance(data, RolloutDataModule):
            raise ConfigError(
                "The Trainer has no prompts.",
                expected="trainer.fit(module, data) with a RolloutDataModule",
                given=None if data is None else type(data).__name__,
            )
        quiet()
        if "PL_GLOBAL_SEED" not in os.environ:
            seed_everything(0, verbose=False)
        if self._folder is None:
            trainer.num_sanity_val_steps = 0
            trainer.log_every_n_steps = 1  # pyright: ignore[reportAttributeAccessIssue]
            trainer.callbacks = [one for one in trainer.callbacks if type(one) not in SUMMARIES]  # pyright: ignore
        trainer.accumulate_grad_batches = data.parts
        self._choose(trainer)

    def _choose(self, trainer: Trainer) -> None:
        command = str(trainer.state.fn.value)  # pyright: ignore[reportOptionalMemberAccess]
        if self._folder is None or trainer.default_root_dir != str(self._folder):
            self._own = None if trainer.default_root_dir == os.getcwd() else trainer.default_root_dir
        own = [one for one in trainer.loggers if not isinstance(one, RunCSVLogger) and not _is_stock(one, trainer)]
        self._other_loggers = own if trainer.loggers else None
        trained = self._trained if trainer.global_step > 0 else None
        if command != "fit" or trained is None:
            place = self._own if trained is None else str(trained)
            self._settle(trainer, folders.place(command, place, self.name, resume=False)[0])
        elif trained != self._folder:  # it was evaluated since, in a folder of that
            self._settle(trainer, trained)
        if command == "fit":
            self._trained = self._folder

    def _settle(self, trainer: Trainer, folder: Path) -> None:
        self._folder = folder = folder.absolute()
        # The Trainer has no other way to be told a folder after it was made.
        trainer._default_root_dir = str(folder)  # pyright: ignore[reportAttributeAccessIssue]
        if self._other_loggers is not None:
            trainer.loggers = [RunCSVLogger(folder), *self._other_loggers]

    def setup(self, trainer: Trainer, pl_module: "GRPOModule", stage: str) -> None:
        """Take the folder of a training."""
        assert self._folder is not None
        if stage == "fit" and trainer.is_global_zero:
            self._lock.take(self._folder)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: "GRPOModule", checkpoint: dict[str, Any]) -> None:
        """Go on in the folder of the run whose last checkpoint is loaded, unless the Trainer was given another."""
        path = Path(str(trainer.ckpt_path)).absolute()
        run, command = path.parent.parent, str(trainer.state.fn.value)  # pyright: ignore[reportOptionalMemberAccess]
        if self._own is not None or path.name != "last.ckpt" or not folders.is_run(run) or run == self._folder:
            return
        self._let_go()
        self._settle(trainer, folders.place(command, str(run), self.name, resume=True)[0])
        self._trained = self._folder if command == "fit" else self._trained
        self.setup(trainer, pl_module, command)

    def on_fit_start(self, trainer: Trainer, pl_module: "GRPOModule") -> None:
        """Keep the last checkpoint of another run from being overwritten; write the configuration."""
        if trainer.is_global_zero and (trainer.ckpt_path is not None or trainer.global_step == 0):
            folders.keep_last(Path(trainer.default_root_dir), trainer.ckpt_path)
        self._configuration(trainer, pl_module).on_fit_start(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Write the configuration of a command that does not train."""
        if trainer.state.fn not in (None, TrainerFn.FITTING):
            self._configuration(trainer, pl_module).setup(trainer, pl_module, str(trainer.state.fn.value))

    on_test_start = on_predict_start = on_validation_start

    def _configuration(self, trainer: Trainer, module: "GRPOModule") -> RunConfig:
        parser, config = configuration(trainer, module, self.groups)
        return RunConfig(parser, config, overwrite=True)

    def on_exception(self, trainer: Trainer, pl_module: "GRPOModule", exception: BaseException) -> None:
        """Let go of the folder, and say where a run stands that a signal ended."""
        if isinstance(exception, (Interrupted, InterruptedTogether)) and trainer.is_global_zero:
            print(standing(exception, trainer, "trainer.fit(…, ckpt_path=<that file>)"), flush=True)
        self._let_go()

    def teardown(self, trainer: Trainer, pl_module: "GRPOModule", stage: str) -> None:
        """Let go of the folder."""
        self._let_go()

    def _let_go(self) -> None:
        self._lock.release()
        folders.let_go()


def standing(interrupted: Interrupted | InterruptedTogether, trainer: Trainer, again: str) -> str:
    """Return where an interrupted run stands and how it goes on, as a paragraph."""
    saved = folders.last_checkpoint(trainer.default_root_dir)
    name, done = signal.Signals(interrupted.number).name, trainer.current_epoch
    if trainer.state.fn != TrainerFn.FITTING:
        return f"\nInterrupted by {name}."
    where = f"Interrupted by {name} in iteration {done + 1} of {trainer.max_epochs}."
    if not trainer.fit_loop.epoch_progress.current.ready:  # pyright: ignore[reportAttributeAccessIssue]
        where = f"Interrupted by {name} before the first iteration."
    elif done == trainer.max_epochs:
        where = f"Interrupted by {name} after the last of {done} iterations."
    if saved is None:
        return f"\n{where} No checkpoint had been written."
    return f"\n{where} {folders.shown(saved)} is its last checkpoint. Go on with:\n  {again}"


def _is_stock(logger: Logger, trainer: Trainer) -> bool:
    """Return whether it is the logger that a Trainer has which was told none."""
    stock = type(logger) in (CSVLogger, TensorBoardLogger) and logger.name == "lightning_logs"
    return stock and logger.save_dir == trainer.default_root_dir


class _AsDescribed:
    """Stands for a parser where a part of a run has no name that a parser could find it by."""

    def dump(self, config: Namespace) -> str:
        return yaml.safe_dump(config.as_dict(), sort_keys=False, allow_unicode=True)

    def save(self, config: Namespace, path: str, **kwargs: Any) -> None:
        Path(path).write_text(self.dump(config), encoding="utf-8")


def configuration(
    trainer: Trainer, module: "GRPOModule", groups: Mapping[str, type[Callback]]
) -> tuple[Any, Namespace]:
    """Return a parser, and the configuration of the run's objects in the form that the command line has for it."""
    data: Any = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
    seed = os.environ.get("PL_GLOBAL_SEED")
    described: dict[str, Any] = {
        "seed_everything": int(seed) if seed else True,
        "trainer": trainer_settings(trainer, (*groups.values(), RunFolder, Peers)),
        "model": describe(module)["init_args"],
        "data": describe(data)["init_args"],
    }
    described["model"] |= {"objective": describe(module.objective), "optimizer": described_optimizer(module.optimizer)}
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--seed_everything", type=bool | int)
    parser.add_class_arguments(Trainer, "trainer", fail_untyped=False, skip={"accumulate_grad_batches"})
    parser.add_class_arguments(type(module), "model", fail_untyped=False)
    parser.add_class_arguments(type(data), "data", fail_untyped=False)
    for group, cls in groups.items():
        found = [one for one in trainer.callbacks if type(one) is cls]  # pyright: ignore
        described[group] = describe(found[0])["init_args"] if found else {}
        parser.add_class_arguments(cls, group, fail_untyped=False)
    parser.add_argument("--ckpt_path", type=str | None)
    described["ckpt_path"] = None if trainer.ckpt_path is None else str(trainer.ckpt_path)
    try:
        return parser, parser.parse_object(described)
    except Exception:  # a class of the user's own may be one that no parser builds
        return _AsDescribed(), Namespace(**described)
