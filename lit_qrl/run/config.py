"""The run folder's `config.yaml`: what a run was started with, and what differs when it goes on."""

import logging
from enum import Enum
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback

from lit_qrl.aliases import current
from lit_qrl.errors import listed
from lit_qrl.run.folder import CONFIG_FILE, set_aside, shown

log = logging.getLogger(__name__)

# A default such as that of `interval` of Lightning's `Timer`: a member where the signature says str.
yaml.SafeDumper.add_multi_representer(Enum, lambda dumper, one: dumper.represent_data(one.value))

LIMITS = ("trainer.max_epochs", "trainer.max_steps")
"""How long a run is: a reason to resume it, but also the scale of a learning rate that decays."""
NOT_LEARNING = (
    *("ckpt_path", "dry_run", "resume_if_possible", "return_predictions", "verbose", "weights_only"),
    *("checkpoint.*", "monitor.*", "progress.*", "report.*"),
    *("trainer.min_*", "trainer.max_*", "trainer.limit_val_*", "trainer.limit_test_*", "trainer.limit_predict_*"),
    *("trainer.*check*", "trainer.num_sanity_*", "trainer.log_every_*", "trainer.enable_*", "trainer.logger*"),
    *("trainer.default_root_dir", "trainer.profiler*", "trainer.detect_anomaly", "trainer.model_registry"),
    *("model.evaluate_first", "data.evaluat*", "data.micro_batches", "data.max_tokens_per_micro_batch"),
    *("data.engine.gpu_memory_utilization", "data.engine.kv_cache_gib", "data.engine.step_timeout"),
    "data.engine.start_timeout",
    *("data.task.evaluation_*", "publisher.max_restarts", "publisher.on_fault", "publisher.probe_every"),
    "publisher.evaluation_format",
)
"""Settings that decide how long a run is, what is shown of it and where it lies, but not what it learns."""


class RunConfig(SaveConfigCallback):
    """Writes `config.yaml`; one of other settings is kept as `config.1.yaml`, and a resumed run says what is new.

    A training writes it when nothing can be refused any more, so that a run that is refused changes nothing.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the configuration of a command that does not train."""
        if stage != "fit":
            self._write(trainer, pl_module, stage)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the configuration of a training."""
        self._write(trainer, pl_module, "fit")

    def _write(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.is_global_zero and not self.already_saved:
            self._compare(Path(trainer.default_root_dir) / CONFIG_FILE, resumes=stage == "fit")
        super().setup(trainer, pl_module, stage)

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the loggers every setting under the key that the command line has for it."""
        for logger in trainer.loggers:
            logger.log_hyperparams(self._settings)

    @cached_property
    def _settings(self) -> dict[str, Any]:
        return flat(yaml.safe_load(self.parser.dump(self.config)))

    def _compare(self, own: Path, resumes: bool) -> None:
        now = self._settings
        checkpoint = self.config.get("ckpt_path")
        former = Path(checkpoint).absolute().parent.parent / CONFIG_FILE if checkpoint else own
        changed = changed_settings(self._read(former), now) if resumes and checkpoint and former.is_file() else []
        if own.is_file() and changed_settings(self._read(own), now, everything=True):
            kept = set_aside(own)
            former = kept if former == own else former
        if changed:
            log.warning(
                "The run goes on with other settings than it was trained with: %s. The former are in %s.",
                listed(changed),
                shown(former),
            )

    def _read(self, file: Path) -> dict[str, Any]:
        """Return a file's settings; options that an older version did not have are at their defaults."""
        try:
            return flat(yaml.safe_load(self.parser.dump(self.parser.parse_path(str(file), env=False))))
        except (Exception, SystemExit):  # a setting that there is no more, or a module that is not here
            return _read(file)


def changed_settings(former: dict[str, Any], now: dict[str, Any], everything: bool = False) -> list[str]:
    """Return the keys whose values differ between two flat configurations; of a class that differs, the class alone.

    Args:
        former: of the run so far, as `flat` returns it.
        now: of the run from here.
        everything: also count what changes nothing in the learning.

    >>> changed_settings({"data.group_size": 8, "trainer.max_epochs": 2}, {"data.group_size": 4})
    ['data.group_size']
    """
    differing = sorted(key for key in former.keys() | now.keys() if former.get(key) != now.get(key))
    if everything:
        return [key for key in differing if key not in ("ckpt_path", "dry_run", "resume_if_possible")]
    decays = now.get("model.lr_schedule", "constant") != "constant" or now.get("model.warmup")
    named: list[str] = []
    for key in differing:
        silent = any(fnmatchcase(key, pattern) for pattern in NOT_LEARNING) and not (decays and key in LIMITS)
        if not silent and not any(key.startswith(f"{above}.") for above in named):
            named.append(key)
    return named


def flat(value: Any, key: str = "") -> dict[str, Any]:
    """Return a configuration as one value per setting, under the keys that the command line has for them.

    A class stands under the key of its place, a class in a list under its name; it is called as it is today, so that a
    run may go on after its class has moved. What is null is left out.

    >>> flat({"trainer": {"callbacks": [{"class_path": "lit_qrl.callbacks.AIS", "init_args": {"clip": 5.0}}]}})
    {'trainer.callbacks.AIS': 'lit_qrl.callbacks.AIS', 'trainer.callbacks.AIS.clip': 5.0}
    """
    if isinstance(value, dict) and "class_path" in value:
        arguments = {**(value.get("init_args") or {}), **(value.get("dict_kwargs") or {})}
        return {key: current(value["class_path"]), **flat(arguments, key)}
    if isinstance(value, dict):
        found: dict[str, Any] = {}
        for name, part in value.items():
            found.update(flat(part, f"{key}.{name}" if key else str(name)))
        return found
    if isinstance(value, list) and any(isinstance(part, dict) for part in value):
        found = {}
        for index, part in enumerate(value):
            path = part.get("class_path") if isinstance(part, dict) else None
            found.update(flat(part, f"{key}.{path.rpartition('.')[2] if path else index}"))
        return found
    return {} if value is None or value == [] else {key: value}


def _read(path: Path) -> dict[str, Any]:
    try:
        return flat(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
