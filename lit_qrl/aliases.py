"""Names of earlier versions: of modules, in Python, in YAML and on the command line."""

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {
    "callbacks.base": "loop.hooks",
    "callbacks.geometric": "callbacks.rejection",
    "callbacks.masked": "callbacks.truncated",
    "callbacks.opsm": "callbacks.rejection",
    "callbacks.veto": "callbacks.rejection",
    "loggers": "run.loggers",
    "precision.formats": "formats",
    "precision.formats.configs": "formats.base",
    "precision.lora4bit": "precision.packed_lora",
    "rewards.boxed": "rewards.simple",
    "rewards.constant": "rewards.simple",
    "rewards.countdown": "rewards.puzzles",
    "rewards.episode": "rewards.simple",
    "rewards.exact_match": "rewards.simple",
    "rewards.format": "rewards.simple",
    "rewards.sudoku": "rewards.puzzles",
    "rollout.transformers": "rollout.embedded.engine",
}
"""From what a module or package was called to what it is called, both within `lit_qrl`; what lay in it is in there."""

OFFERED = {
    "CausalPolicy": "policy",
    "GRPOModule": "module",
    "RolloutDataModule": "data.module",
    "default_callbacks": "callbacks.defaults",
    "resume_from": "run.folder",
}
"""What `lit_qrl` itself offers, and the module in which it is; a configuration names it there."""


def offering(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a package's `__getattr__`, which loads what the package offers when it is asked for.

    Args:
        package: its name.
        places: the module of each name, from the package on.

    >>> offering("lit_qrl", {"derive_seed": "seeding"})("derive_seed").__module__
    'lit_qrl.seeding'
    """

    def found(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{places[name]}"), name)
        setattr(sys.modules[package], name, value)  # the next time nobody asks
        return value

    return found


def current(path: str) -> str:
    """Return the dotted path of a module, or of what a module holds, under its name of today.

    >>> current("lit_qrl.callbacks.base.RLCallback")
    'lit_qrl.loop.hooks.RLCallback'
    >>> current("lit_qrl.callbacks.ais.AIS")
    'lit_qrl.callbacks.ais.AIS'
    >>> current("lit_qrl.CausalPolicy")
    'lit_qrl.policy.CausalPolicy'
    """
    parts = path.split(".")
    if len(parts) == 2 and parts[0] == "lit_qrl" and parts[1] in OFFERED:
        return f"lit_qrl.{OFFERED[parts[1]]}.{parts[1]}"
    for end in range(len(parts), 1, -1):
        moved = MOVED.get(".".join(parts[1:end])) if parts[0] == "lit_qrl" else None
        if moved:
            return ".".join(["lit_qrl", moved, *parts[end:]])
    return path


class OldPaths:
    """Finds modules under their former names, and says in one line what each is called now."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to load a module that has another name today, None for any other."""
        return ModuleSpec(name, self) if name.startswith("lit_qrl.") and current(name) != name else None  # pyright: ignore[reportArgumentType]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module of today: under both names there is one."""
        module = import_module(current(spec.name))
        spec.loader_state = module.__spec__
        if os.environ.get("LOCAL_RANK", "0") == "0":
            logging.getLogger(__name__).warning("%s is now %s.", spec.name, module.__name__)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Leave a module as it is that has run already; what it says of its origin stays its own."""
        module.__spec__ = module.__spec__.loader_state if module.__spec__ else None


def install() -> None:
    """Let Python find modules under their former names; before its own finders, which would load a second copy."""
    if not any(isinstance(finder, OldPaths) for finder in sys.meta_path):
        sys.meta_path.insert(0, OldPaths())
