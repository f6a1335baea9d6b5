"""LightningCLI with the parts that every run has: publisher, monitor, guard, report, checkpoint, progress."""

import logging
import warnings
from pathlib import Path
from typing import Any

from jsonargparse import set_parsing_settings
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger

# Imported so that `class_path: AIS` resolves without a module path.
from lit_qrl import callbacks, objective, policy, precision, rewards, rollout, strategies
from lit_qrl.callbacks.checkpoint import RunCheckpoint, resolve_checkpoint
from lit_qrl.callbacks.guard import Guard
from lit_qrl.callbacks.mismatch import MismatchMonitor
from lit_qrl.callbacks.progress import RLProgress
from lit_qrl.callbacks.publisher import WeightPublisher
from lit_qrl.callbacks.report import Report
from lit_qrl.cli import TRAINING, run_folder_name
from lit_qrl.data import tasks
from lit_qrl.data.module import RolloutDataModule
from lit_qrl.errors import ConfigError
from lit_qrl.loggers import RunCSVLogger
from lit_qrl.module import GRPOModule
from lit_qrl.parser_errors import readable
from lit_qrl.precision import formats

FORCED = {
    "progress": RLProgress,  # first: it prints a line before the next publish
    "publisher": WeightPublisher,
    "monitor": MismatchMonitor,
    "guard": Guard,
    "report": Report,
    "checkpoint": RunCheckpoint,
}
TRAINER_DEFAULTS = {
    "num_sanity_val_steps": 0,  # the module evaluates once before the first iteration, and logs it
    "use_distributed_sampler": False,  # ranks take their share of prompts themselves
    "enable_model_summary": False,
    "log_every_n_steps": 1,
}


class QRLParser(LightningArgumentParser):
    """A parser whose errors are one paragraph."""

    def error(self, message: str, ex: Exception | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Raise the paragraph; `main` prints it."""
        options = [option for action in self._actions for option in action.option_strings]
        raise ConfigError(readable(message, known_classes(), options)) from ex


class QRLCLI(LightningCLI):
    """The Trainer's commands over `GRPOModule` and `RolloutDataModule`."""

    arguments: list[str]

    @classmethod
    def run(cls, args: list[str]) -> "QRLCLI":
        """Parse `args`, build everything, and run the command."""
        set_parsing_settings(docstring_parse_attribute_docstrings=True)
        quiet()
        cls.arguments = args
        return cls(
            GRPOModule,
            RolloutDataModule,
            args=args,
            parser_class=QRLParser,
            auto_configure_optimizers=False,
            seed_everything_default=0,
            trainer_defaults=dict(TRAINER_DEFAULTS),
            parser_kwargs={name: {"allow_abbrev": False} for name in TRAINING},
            save_config_kwargs={"overwrite": True},
            load_from_checkpoint_support=False,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Give what must always be there a group of its own, and link what must agree."""
        for name, callback in FORCED.items():
            parser.add_lightning_class_args(callback, name)
        parser.add_argument(
            "--resume_if_possible", type=bool, default=False, help="Continue the run folder's last checkpoint if any."
        )
        parser.link_arguments("data.micro_batches", "trainer.accumulate_grad_batches")

    def _parse_ckpt_path(self) -> None:
        """Leave the configuration alone: the YAML is the record of a run, not the checkpoint."""

    def before_instantiate_classes(self) -> None:
        """Choose the run folder and the checkpoint before anything is built."""
        config = self.config[str(self.subcommand)]
        resume = bool(config.get("resume_if_possible")) or config.get("ckpt_path") == "last"
        if config.trainer.default_root_dir is None:
            base = Path("runs") / run_folder_name(self.arguments)
            config.trainer.default_root_dir = str(next_run_folder(base, resume))
        config.ckpt_path = resolve_checkpoint(
            config.get("ckpt_path"), config.trainer.default_root_dir, bool(config.get("resume_if_possible"))
        )

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the Trainer; `metrics.csv` is written beside whatever logger is configured."""
        config = self._get(self.config_init, "trainer")
        if config.logger is not False:
            loggers = config.logger if isinstance(config.logger, list) else [config.logger]
            chosen = [logger for logger in loggers if isinstance(logger, Logger)]
            kwargs["logger"] = [RunCSVLogger(config.default_root_dir), *chosen]
        return super().instantiate_trainer(**kwargs)

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        if config.get("enable_progress_bar") is False:
            callbacks = [callback for callback in callbacks if not isinstance(callback, ProgressBar)]
        return super()._instantiate_trainer(config, callbacks)


def next_run_folder(base: Path, resume: bool) -> Path:
    """Return `base/<n>`: the newest one to resume, else the next that is free."""
    taken = sorted(int(path.name) for path in base.glob("*") if path.name.isdigit())
    if resume and taken:
        return base / str(taken[-1])
    return base / str(taken[-1] + 1 if taken else 1)


def known_classes() -> list[str]:
    """Return the names that a `class_path` may have without a module path."""
    return sorted(
        {
            name
            for package in (callbacks, formats, objective, policy, precision, rewards, rollout, strategies, tasks)
            for name, value in vars(package).items()
            if isinstance(value, type) and not name.startswith("_")
        }
    )


def quiet() -> None:
    """Silence the advice that does not apply to reinforcement learning."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric.utilities.seed").setLevel(logging.WARNING)
    for pattern in (
        "LightningCLI's args parameter.*",
        ".*does not have many workers.*",
        ".*smaller than the logging interval.*",
        ".*`training_step` returned",
        ".*`IterableDataset` has `__len__` defined.*",
        ".*LeafSpec.*is deprecated.*",  # Lightning's own use of torch
    ):
        warnings.filterwarnings("ignore", pattern)
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    ours = logging.getLogger("lit_qrl")
    if not ours.handlers:
        ours.addHandler(logging.StreamHandler())
    ours.setLevel(logging.INFO)
