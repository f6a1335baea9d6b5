"""The callbacks that every run has, on the command line and in Python."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback

from lit_qrl.callbacks.checkpoint import RunCheckpoint
from lit_qrl.callbacks.guard import Guard
from lit_qrl.callbacks.mismatch import MismatchMonitor
from lit_qrl.callbacks.progress import RLProgress
from lit_qrl.callbacks.publisher import WeightPublisher
from lit_qrl.callbacks.report import Report
from lit_qrl.callbacks.run_folder import RunFolder
from lit_qrl.errors import ConfigError, nearest
from lit_qrl.run.console import quiet

FORCED: dict[str, type[Callback]] = {
    "progress": RLProgress,  # first: it prints a line before the next publish
    "publisher": WeightPublisher,
    "monitor": MismatchMonitor,
    "guard": Guard,
    "report": Report,
    "checkpoint": RunCheckpoint,
}
"""By the name that their settings have in a configuration."""


def default_callbacks(*chosen: Callback, name: str = "run", **settings: Mapping[str, Any] | None) -> list[Callback]:
    """Return what `Trainer(callbacks=…)` takes for a run as the command line makes it.

    The run gets a folder `runs/<name>/<n>`, or `Trainer(default_root_dir=…)`, with a lock while it trains,
    `config.yaml` written from the objects, `metrics.csv`, event log, samples, checkpoints and report. The Trainer's
    settings that a run needs are made: no sanity check, gradients accumulated over `data.micro_batches`.

    Args:
        *chosen: corrections, noise, and any callback of Lightning.
        name: of the runs, where the Trainer has no `default_root_dir`.
        **settings: arguments of `progress`, `publisher`, `monitor`, `guard`, `report` and `checkpoint`, as in a
            configuration; `progress=None` leaves the table out.

    Raises:
        ConfigError: for settings of something else.

    >>> [type(one).__name__ for one in default_callbacks(publisher={"format": "fp8_row"})]
    ['RLProgress', 'WeightPublisher', 'MismatchMonitor', 'Guard', 'Report', 'RunCheckpoint', 'RunFolder']
    """
    quiet()  # before a Trainer is made, which advertises
    for group, given in settings.items():
        if group not in FORCED:
            raise ConfigError(
                f"default_callbacks has no {group!r}.",
                expected=", ".join(FORCED),
                remedy=f"{nearest(group, FORCED)} A callback of your own comes first, without a name.",
            )
        if given is None and group != "progress":
            raise ConfigError(f"Every run has {group!r}.", expected="its arguments, or nothing", given=None)
    kept = {group: cls for group, cls in FORCED.items() if group not in settings or settings[group] is not None}
    made = [cls(**(settings.get(group) or {})) for group, cls in kept.items()]
    return [*chosen, *made, RunFolder(name, FORCED)]
