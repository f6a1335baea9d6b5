"""What Lightning refuses while it builds the Trainer, as one paragraph with key and remedy."""

import re
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_qrl.errors import ConfigError, nearest

REFUSALS = (MisconfigurationException, ValueError, TypeError, ImportError)
"""What the Trainer's constructor raises for settings that cannot work."""
HARDWARE = ("accelerator", "devices", "strategy")


def refused(error: Exception, settings: Mapping[str, Any]) -> ConfigError:
    """Return the paragraph for what the Trainer's constructor raised.

    Args:
        error: Lightning's own.
        settings: the Trainer's arguments by name.

    >>> print(refused(ValueError("You selected an invalid accelerator name: `accelerator='gpuu'`."),
    ...     {"accelerator": "gpuu", "devices": "auto"}))
    Lightning cannot build the Trainer: You selected an invalid accelerator name: `accelerator='gpuu'`. Given: \
trainer.accelerator: gpuu. Did you mean 'gpu'?
    """
    text = " ".join(str(error).split()).rstrip(".!")
    keys = [key for key, value in settings.items() if value is not None and re.search(rf"\b{key}\b", text)]
    keys = keys or [key for key in HARDWARE if settings.get(key, "auto") != "auto"]
    given = ", ".join(f"trainer.{key}: {_shown(settings[key])}" for key in keys)
    remedy = _remedy(text, settings) or (f"Correct {_listed(keys)}." if keys else "See lit-qrl fit --help.")
    return ConfigError(f"Lightning cannot build the Trainer: {text}.", given=given or None, remedy=remedy)


def _remedy(text: str, settings: Mapping[str, Any]) -> str:
    here = [name for name in AcceleratorRegistry if AcceleratorRegistry[name]["accelerator"].is_available()]
    if "invalid accelerator name" in text:
        return nearest(str(settings["accelerator"]), ["auto", "gpu", *AcceleratorRegistry])
    if "gpu backend" in text or "accelerator is not available" in text:
        return f"Set trainer.accelerator to auto, or to what this machine has: {', '.join(here)}."
    if "invalid strategy name" in text:
        return nearest(str(settings["strategy"]), ["auto", *StrategyRegistry])
    if "requires a GPU" in text:
        return "Set trainer.strategy to auto, or run where there is a GPU."
    if "precision" in text and "plugins" in text:
        return "Leave trainer.precision out: the plugin says what is computed in which precision."
    return ""


def _listed(keys: list[str]) -> str:
    return " or ".join(f"trainer.{key}" for key in keys)


def _shown(value: Any) -> str:
    plain = isinstance(value, (str, int, float, list, tuple))
    return str(value) if plain and not (isinstance(value, list) and any(map(_built, value))) else type(value).__name__


def _built(value: Any) -> bool:
    return not isinstance(value, (str, int, float))
