"""What a Trainer was made with, in the form that a configuration has for it."""

from typing import Any

import torch
from lightning.pytorch import Trainer

from lit_qrl.precision.source import PublishingPrecision
from lit_qrl.run.description import Described, describe

PLAIN_SETTINGS = (
    *("max_epochs", "min_epochs", "max_steps", "min_steps", "limit_train_batches", "limit_val_batches"),
    *("limit_test_batches", "limit_predict_batches", "check_val_every_n_epoch", "gradient_clip_val"),
    *("num_sanity_val_steps", "log_every_n_steps", "fast_dev_run"),
)
"""What can be read from a Trainer under the name that its constructor has for it."""


def trainer_settings(trainer: Trainer, without: tuple[type, ...] = ()) -> dict[str, Any]:
    """Return the arguments with which a Trainer is made again, except its loggers.

    Args:
        trainer: before or in a run.
        without: classes of callbacks that are left out.

    >>> trainer_settings(Trainer(max_epochs=3, logger=False, accelerator="cpu"))["max_epochs"]
    3
    """
    plugin, strategy, clip = trainer.precision_plugin, trainer.strategy, trainer.gradient_clip_algorithm
    quantized = isinstance(plugin, PublishingPrecision)
    callbacks = [one for one in trainer.callbacks if type(one) not in without]  # pyright: ignore[reportAttributeAccessIssue]
    return {
        "accelerator": trainer.accelerator.name(),
        "devices": trainer.num_devices,
        "num_nodes": trainer.num_nodes,
        "strategy": describe(strategy) if isinstance(strategy, Described) else _strategy_name(trainer),
        "precision": None if quantized else trainer.precision,
        "plugins": [describe(plugin)] if quantized else None,
        "gradient_clip_algorithm": None if clip is None else clip.value,
        "callbacks": [describe(one) for one in callbacks] or None,
        "default_root_dir": trainer.default_root_dir,
        "deterministic": True if torch.are_deterministic_algorithms_enabled() else None,
        "use_distributed_sampler": False,
        "enable_model_summary": False,
        **{name: getattr(trainer, name) for name in PLAIN_SETTINGS},
    }


def _strategy_name(trainer: Trainer) -> str:
    return "auto" if trainer.world_size == 1 else getattr(trainer.strategy, "strategy_name", "auto")
