"""LightningCLI with the parts that every run has: publisher, monitor, guard, report, checkpoint, progress."""

import inspect
import re
import shlex
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from inspect import isabstract
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch import Callback, Trainer, loggers
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from torch.optim import Optimizer

# Imported so that `class_path: AIS` resolves without a module path.
from lit_qrl import (
    callbacks,
    diffusion_policy,
    formats,
    objective,
    optim,
    policy,
    precision,
    rewards,
    rollout,
    strategies,
)
from lit_qrl.aliases import current
from lit_qrl.callbacks.checkpoint import all_iterations_had, resolve_checkpoint
from lit_qrl.callbacks.defaults import FORCED
from lit_qrl.callbacks.predictions import Predictions
from lit_qrl.callbacks.run_folder import standing
from lit_qrl.cli import TRAINING
from lit_qrl.cli.config_files import config_files, expanded, found, located, run_folder_name
from lit_qrl.cli.dry_run import dry_run
from lit_qrl.cli.errors import made_by_training, paragraph, refused
from lit_qrl.cli.parser import ReadableParser, in_object, in_words
from lit_qrl.data import tasks
from lit_qrl.data.module import RolloutDataModule
from lit_qrl.data.task import Task
from lit_qrl.errors import ConfigError, IncompleteError, StoppedError, collected
from lit_qrl.loop.correction import check_combination
from lit_qrl.loop.evaluation import BOUNDS, is_bound
from lit_qrl.loop.hooks import RLCallback
from lit_qrl.module import GRPOModule
from lit_qrl.network.adapters import drop_loftq
from lit_qrl.optim.build import filled_in, leaves_open
from lit_qrl.precision import QuantizedPrecision
from lit_qrl.receipts.ledger import PublishError
from lit_qrl.run.checkpoint_files import check_identity, read_checkpoint
from lit_qrl.run.config import RunConfig
from lit_qrl.run.console import BEGAN, LOG_FILE, kept_from_the_screen, quiet
from lit_qrl.run.event_log import METRICS_FILE
from lit_qrl.run.folder import RunLock, keep_last, let_go, place, shown
from lit_qrl.run.interrupt import Interrupted, InterruptedTogether
from lit_qrl.run.loggers import RunCSVLogger
from lit_qrl.run.stop import stop_where_short
from lit_qrl.shipped import SHIPPED
from lit_qrl.strategies.sharded import check_strategy

REFUSALS = (MisconfigurationException, ValueError, TypeError, ImportError, RuntimeError)
"""What the Trainer's constructor raises for settings that cannot work."""
CKPT_PATH = (
    "Checkpoint to go on from, or to evaluate: a .ckpt file, or `last`, that of the newest run of this configuration "
    "that has one."
)
USAGE = """lit-qrl {0} --config FILE [--config FILE ...] [--KEY VALUE ...]

Later files and options override earlier ones.

Examples:
  lit-qrl {0} --config configs/quickstart.yaml
  lit-qrl {0} --config configs/quickstart.yaml --config configs/correction/tis.yaml --data.temperature 0.9
  lit-qrl {0} --data.engine.help VLLMEngine     shows the options of a class

What a first run sets (docs/keys.md has all keys with their defaults):
{1}
"""
FIRST_KEYS = {
    "model.policy.model": "folder or hub name of the model",
    "data.task": "prompts and rewards: DatasetTask with --data.task.path, …",
    "data.engine": "what generates the completions: TransformersEngine, VLLMEngine, …",
    "publisher.format": "number format of the sampler's weights",
    "trainer.max_epochs": "iterations",
    "model.optimizer.lr": "learning rate",
    "data.prompts_per_iteration": "prompts per iteration",
    "data.group_size": "completions per prompt",
    "data.max_prompt_tokens": "longest prompt",
    "data.max_completion_tokens": "longest completion",
}
"""What the help begins with."""
GROUPS = ("model", "data", "publisher", *sorted({*FORCED} - {"publisher"}))
"""Options in the order of the help, Lightning's own behind them."""
TRAINER_DEFAULTS = {
    "num_sanity_val_steps": 0,  # the module evaluates once before the first iteration, and logs it
    "use_distributed_sampler": False,  # ranks take their share of prompts themselves
    "enable_model_summary": False,
    "log_every_n_steps": 1,
    "gradient_clip_val": 1.0,  # as TRL's, and as all recipes here but AIS's, which clip more
}


class QRLParser(ReadableParser, LightningArgumentParser):
    """The parser of the Trainer's commands: it knows the names that classes may have."""

    def classes(self, key: str) -> list[str]:
        """Return the names that a `class_path` may have at a key."""
        return sorted(classes_at(key))

    def add_class_arguments(self, theclass: type, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Add a class's arguments; what an optimizer leaves open has no default here."""
        added = super().add_class_arguments(theclass, *args, **kwargs)
        if isinstance(theclass, type) and issubclass(theclass, Optimizer):
            self.set_defaults(dict.fromkeys(leaves_open(theclass)))
        return added

    def parse_object(self, obj: Any, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the parsed arguments of a class; functions among its rewards are taken for such."""
        in_object(obj)
        return super().parse_object(obj, *args, **kwargs)

    def parse_args(self, args: Any = None, *more: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the parsed command line, with the same done to it."""
        return super().parse_args(None if args is None else in_words(args), *more, **kwargs)

    def dump(self, *args: Any, **kwargs: Any) -> str:
        """Return a configuration as YAML, in which what has moved stands under its path of today."""
        text = super().dump(*args, **kwargs)
        return re.sub(r'(class_path"?: "?)(lit_qrl[\w.]+)', lambda found: found[1] + current(found[2]), text)


class QRLCLI(LightningCLI):
    """The Trainer's commands over `GRPOModule` and `RolloutDataModule`."""

    arguments: list[str]
    lock: RunLock
    parts: ExitStack
    """What lasts as long as the command."""
    dry_run: bool | float
    """Whether nothing is loaded, or the GiB of the GPU that is judged for."""
    folder: Path | None
    """Of the run, once it is known."""

    @classmethod
    def run(cls, args: list[str]) -> "QRLCLI":
        """Parse `args`, build everything, and run the command."""
        quiet()
        let_place_be_left_out()
        cls.arguments, cls.lock, cls.parts, cls.folder = args, RunLock(), ExitStack(), None
        try:
            return cls(
                GRPOModule,
                RolloutDataModule,
                args=expanded(args),
                parser_class=QRLParser,
                auto_configure_optimizers=False,
                seed_everything_default=0,
                trainer_defaults=dict(TRAINER_DEFAULTS),
                save_config_callback=RunConfig,
                save_config_kwargs={"overwrite": True},
                load_from_checkpoint_support=False,
            )
        finally:
            cls.parts.close()
            cls.lock.release()
            let_go()

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the arguments; what is wrong with a file says where it stands."""
        try:
            super().parse_arguments(parser, args)
        except ConfigError as refused:
            raise located(refused, self.arguments) from refused

    def subcommands(self) -> dict[str, set[str]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the command that is run alone; with the parsers of the other three, parsing takes twice as long."""
        return {name: skipped for name, skipped in LightningCLI.subcommands().items() if name == self.arguments[0]}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Give what must always be there a group of its own, and link what must agree."""
        for name, callback in FORCED.items():
            parser.add_lightning_class_args(callback, name)
        parser.add_argument(
            "--resume_if_possible", type=bool, default=False, help="Continue the run folder's last checkpoint if any."
        )
        if self.arguments[0] == "fit":
            parser.add_argument(
                "--dry_run",
                type=bool | float,
                nargs="?",
                const=True,
                default=False,
                help="Check everything, print memory by part and the first prompts, and load no weights; a number "
                "judges memory for a GPU of so many GiB instead of this host's device.",
            )
        parser.set_defaults({"model.objective": {"class_path": "GRPO"}})
        source, target = "data.micro_batches", "trainer.accumulate_grad_batches"
        parser.link_arguments(source, target, compute_fn=passes_per_step)

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        """Return a command's parser, whose help begins with examples; `last` is what it is here, not Lightning's."""
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        defaults, lines = parser.get_defaults(), []
        for key, text in FIRST_KEYS.items():
            default = defaults.get(key)
            lines.append(f"  --{key:<28} {text}" + ("" if default is None else f" (default: {default})"))
        parser.usage = USAGE.format(subcommand, "\n".join(lines))
        parser.description = f"lit-qrl {subcommand}: {TRAINING[subcommand]}."
        groups: Any = parser.groups
        for key in GROUPS:
            groups[key].title = f"{key}: {groups[key].title[:1].lower()}{groups[key].title[1:]}"
        groups[subcommand].title, groups["trainer"].title = (
            "options of this command",
            "trainer: Lightning's own options",
        )
        order = [groups[key] for key in (*GROUPS, subcommand, "trainer")]
        parser._action_groups = [*(one for one in parser._action_groups if one not in order), *order]
        for action in parser._actions:
            if action.dest == "ckpt_path":
                action.help = CKPT_PATH
        return parser

    def _set_seed(self) -> None:
        """Seed everything; Lightning's own error of a seed becomes a paragraph."""
        try:
            super()._set_seed()
        except ValueError as error:
            given = self._get(self.config, "seed_everything")
            raise ConfigError("seed_everything is out of range.", expected="0 to 2³² − 1", given=given) from error

    def _parse_ckpt_path(self) -> None:
        """Leave the configuration alone: the YAML is the record of a run, not the checkpoint."""

    @property
    def gib(self) -> float | None:
        """Size of the GPU that a dry run judges for; None is this host's device."""
        return None if isinstance(self.dry_run, bool) else self.dry_run

    def before_instantiate_classes(self) -> None:
        """Choose the run folder and the checkpoint before anything is built."""
        config, command = self.config[str(self.subcommand)], str(self.subcommand)
        self.dry_run = config.pop("dry_run", False)
        if self.gib is not None and not self.gib > 0:
            raise ConfigError("--dry_run is for no GPU.", expected="its size in GiB, such as 80", given=self.gib)
        if self.gib is not None and not torch.cuda.is_available():
            config.trainer.accelerator = "cpu"
        requested, if_possible = config.get("ckpt_path"), bool(config.get("resume_if_possible"))
        last = requested == "last" or (requested is None and if_possible)
        drop_loftq(config.model.get("policy"))
        fill_in_optimizer(config.model)
        folder, run = place(command, config.trainer.default_root_dir, run_folder_name(self.arguments), last)
        config.trainer.default_root_dir = str(folder)
        type(self).folder = folder
        give_place(config.trainer.logger, folder)
        if ours := [file for file in config_files(self.arguments) if found(file) != file]:
            say(f"Not in the working directory, so taken from {SHIPPED}: {', '.join(ours)}.")
        config.ckpt_path = resolve_checkpoint(requested, run, if_possible)
        if command == "fit" and getattr(rank_zero_only, "rank", 0) == 0:
            if not self.dry_run or folder.is_dir():  # a dry run makes none
                self.lock.take(folder)
            if (not self.dry_run or config.ckpt_path is None) and not (last and config.ckpt_path):
                keep_last(folder, config.ckpt_path)  # a damaged one is written over, where an older one is taken
        if not self.dry_run:
            say(f"Started in {time.monotonic() - BEGAN:.0f} s; library output: {folder / LOG_FILE}")
        self.parts.enter_context(kept_from_the_screen(None if self.dry_run else folder))
        if last and config.ckpt_path is None:
            say(f"There is no checkpoint to resume from; starting {folder}.")
        elif last:
            if Path(str(config.ckpt_path)).name != "last.ckpt":
                say(f"The last checkpoint is damaged; going on from {config.ckpt_path}, the newest that is whole.")
            say(f"Resuming {folder}." if command == "fit" else f"Taking {config.ckpt_path}.")

    def instantiate_classes(self) -> None:
        """Build everything; what a class refuses stays one paragraph, however many types its key may have."""
        with collected() as made:
            try:
                super().instantiate_classes()
            except ConfigError:
                raise
            except (ValueError, TypeError) as error:
                if made:
                    raise made[-1] from error
                if str(error).startswith("Does not validate"):  # a class of the user's own refused its arguments
                    while isinstance(error.__cause__, (ValueError, TypeError)):
                        error = error.__cause__
                    raise ConfigError(f"A class refused its arguments: {str(error).rstrip('.')}.") from error
                raise
        path = self._get(self.config_init, "ckpt_path")
        if path:
            saved = read_checkpoint(path, "meta")
            check_identity(saved, self.model.policy)
            if self.subcommand == "fit" and (told := all_iterations_had(saved, self.trainer.max_epochs)):
                say(told)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the Trainer; `metrics.csv` is written beside whatever logger is configured."""
        config = self._get(self.config_init, "trainer")
        folder = kwargs["default_root_dir"] = str(Path(config.default_root_dir).absolute())
        if config.logger is not False:
            loggers = config.logger if isinstance(config.logger, list) else [config.logger]
            chosen = [logger for logger in loggers if isinstance(logger, Logger)]
            kwargs["logger"] = [RunCSVLogger(folder), *chosen]
        return super().instantiate_trainer(**kwargs)

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        if config.get("enable_progress_bar") is False:
            callbacks = [callback for callback in callbacks if not isinstance(callback, ProgressBar)]
        check_callbacks(config.get("callbacks") or [])
        if self.subcommand == "predict":
            callbacks = [*callbacks, Predictions()]
        try:
            trainer = super()._instantiate_trainer(config, callbacks)
        except REFUSALS as error:
            if isinstance(error, ConfigError):
                raise
            raise refused(error, config) from error
        check_strategy(trainer.strategy)  # before other processes are started
        return trainer

    def _run_subcommand(self, subcommand: str) -> None:
        """Run the Trainer; a publish that failed ends it with one paragraph, after event log and report."""
        leave_in_place(self.trainer.strategy)
        given = self.config_init[subcommand]
        tells = subcommand in ("validate", "test") and bool(given.get("verbose"))
        if tells:
            given["verbose"] = False  # of Lightning, whose table has seventeen digits
        say(self.model.policy.ending)
        try:
            if self.dry_run:
                dry_run(self.trainer, self.model, self.datamodule, self.gib)
            else:
                super()._run_subcommand(subcommand)
                if tells and (lines := told(self.trainer.callback_metrics)):
                    say("\n".join([*lines, self._evaluated()]))
        except (PublishError, ConfigError, IncompleteError) as error:
            if isinstance(error, ConfigError) and not made_by_training(error, self.trainer.global_step):
                raise
            raise StoppedError(paragraph(error, shown(self.trainer.default_root_dir))) from error
        except (MisconfigurationException, RuntimeError, MemoryError) as error:
            stop_where_short(self.trainer, error)
            if "conditioned on metric" in str(error):  # EarlyStopping's, which names the metrics that there are
                raise ConfigError(str(error)) from error
            raise
        except (SystemExit, Interrupted) as error:
            ended = (error, error.__context__)  # by itself, or Lightning's way out after it
            interrupted = next((one for one in ended if isinstance(one, Interrupted)), None)
            if isinstance(error, (InterruptedTogether, SIGTERMException)):  # where there are several processes
                interrupted = Interrupted(getattr(error, "number", signal.SIGTERM))
            if interrupted is None:
                raise
            say(standing(interrupted, self.trainer, again(self.arguments)))
            interrupted.told = True
            raise interrupted from None

    def _evaluated(self) -> str:
        """Return what an evaluation was of, and where its numbers are."""
        publisher = next(one for one in self.trainer.callbacks if isinstance(one, callbacks.WeightPublisher))  # pyright: ignore
        sets = (f"{len(one.problems)} of {one.name or one.task.name}" for one in self.datamodule.evaluations)
        kept = f"; kept in {shown(self.trainer.default_root_dir)}/{METRICS_FILE}" if self.trainer.loggers else ""
        return f"Problems: {', '.join(sets)}; format: {publisher.evaluated_in}{kept}."


def fill_in_optimizer(model: Any) -> None:
    """Put the settings that an optimizer leaves open where `config.yaml` records them, in place."""
    chosen = model.optimizer
    cls = resolve_name(chosen.class_path) if isinstance(chosen, Namespace) else None
    if isinstance(cls, type) and issubclass(cls, Optimizer):
        for name, value in filled_in(cls, chosen.init_args, model.get("policy.init_args.lora") is not None).items():
            chosen.init_args[name] = value


def passes_per_step(micro_batches: int | str) -> int:
    """Return what Lightning is told before anything is drawn of how many micro-batches an optimizer step has."""
    return 1 if isinstance(micro_batches, str) else micro_batches


@rank_zero_only
def say(text: str) -> None:
    """Print a line, on the first rank."""
    print(text, flush=True)


def check_callbacks(chosen: Callback | Sequence[Callback]) -> None:
    """Raise `ConfigError` for a callback that every run has, or that may not stand beside another."""
    chosen = [chosen] if isinstance(chosen, Callback) else list(chosen)
    groups = {callback: group for group, callback in FORCED.items()}
    for callback in chosen:
        for known, group in groups.items():
            if isinstance(callback, known):
                raise ConfigError(
                    f"trainer.callbacks holds {type(callback).__name__}, which every run has already.",
                    expected=f"its settings under `{group}`",
                    given="a second one",
                    remedy=f"Remove it from trainer.callbacks and set --{group}.… instead.",
                )
    check_combination(chosen)


KINDS: dict[str, type] = {
    "callbacks": Callback,
    "objective": objective.Objective,
    "policy": policy.CausalPolicy,
    "optimizer": Optimizer,
    "task": Task,
    "tasks": Task,
    "rewards": rewards.Reward,
    "correct": rewards.Reward,
    "engine": rollout.RolloutEngine,
    "format": formats.NumberFormat,
    "plugins": Precision,
    "strategy": Strategy,
    "logger": Logger,
}
BASES = (Optimizer, RLCallback, QuantizedPrecision)


def classes_at(key: str = "") -> dict[str, type]:
    """Return the classes that a `class_path` may name without a module path, at that key (none if unknown) or at any.

    >>> sorted(classes_at("data.engine"))
    ['DiffusionEngine', 'RemoteVLLMEngine', 'TransformersEngine', 'VLLMEngine']
    """
    kinds = tuple(KINDS[part] for part in key.split(".") if part in KINDS) if key else tuple(KINDS.values())
    modules = (
        callbacks,
        diffusion_policy,
        formats,
        loggers,
        objective,
        optim,
        policy,
        precision,
        rewards,
        rollout,
        strategies,
        tasks,
        torch.optim,
    )
    return {
        f"torch.optim.{name}" if module is torch.optim else name: value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, kinds) and not isabstract(value) and value not in BASES
    }


def leave_in_place(strategy: Strategy) -> None:
    """Let the strategy's teardown take neither weights nor optimizer states to the host.

    Lightning does so for what a program does next with its module. A command does nothing, and a user would wait for
    57 GiB at 7B with all weights trained.

    Args:
        strategy: of a Trainer that ends with its process.
    """
    teardown = strategy.teardown

    def in_place() -> None:
        module, optimizers = strategy.lightning_module, strategy.optimizers
        strategy.optimizers = []
        if module is not None:
            module.cpu = lambda: module  # pyright: ignore[reportAttributeAccessIssue]
        try:
            teardown()
        finally:  # what a run stopped for is told after this, with what its learner held
            strategy.optimizers = optimizers
            if module is not None:
                del module.cpu

    strategy.teardown = in_place


def again(arguments: Sequence[str]) -> str:
    """Return the command line with which an interrupted run goes on."""
    words = [word for word in arguments if not word.startswith("--ckpt_path=")]
    if "--ckpt_path" in words:
        at = words.index("--ckpt_path")
        del words[at : at + 2]
    return shlex.join(["lit-qrl", *words, "--ckpt_path", "last"])


def told(metrics: Mapping[str, Any]) -> list[str]:
    """Return a line for each metric of an evaluation, an accuracy with its 95 % interval.

    Args:
        metrics: by name, as the Trainer has them.

    >>> told({"val/accuracy": 0.3359375, "val/accuracy_ci_low": 0.27, "val/accuracy_ci_high": 0.4})
    ['val/accuracy  0.336  [0.270, 0.400]']
    """
    values = {name: float(value) for name, value in metrics.items()}
    shown = [name for name in values if not is_bound(name)]
    width = max(map(len, shown), default=0)
    return [f"{name:{width}}  {values[name]:.3f}{_interval(values, name)}" for name in shown]


def _interval(values: Mapping[str, float], name: str) -> str:
    low, high = (values.get(f"{name}{suffix}") for suffix in BOUNDS if suffix)
    return "" if low is None or high is None else f"  [{low:.3f}, {high:.3f}]"


def let_place_be_left_out() -> None:
    """Make `save_dir` of every logger optional for the parser, which reads signatures; the constructors stay."""
    for logger in vars(loggers).values():
        if isinstance(logger, type) and issubclass(logger, Logger):
            signature = inspect.signature(logger.__init__)
            place = signature.parameters.get("save_dir")
            if place is not None:
                kind = Any if place.annotation is inspect.Parameter.empty else place.annotation
                without = place.replace(default=None, annotation=kind | None)
                parts = {**signature.parameters, "save_dir": without}.values()
                logger.__init__.__signature__ = signature.replace(parameters=list(parts))  # pyright: ignore


def give_place(chosen: Any, run_folder: Path) -> None:
    """Set the `save_dir` that was left out to the run folder.

    Args:
        chosen: `trainer.logger` as it was parsed: one logger, several, or none.
        run_folder: of the run.
    """
    for logger in chosen if isinstance(chosen, list) else [chosen]:
        arguments = getattr(logger, "init_args", None)
        if arguments is not None and "save_dir" in arguments and arguments.save_dir is None:
            arguments.save_dir = str(run_folder)
