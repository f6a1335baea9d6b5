"""Engines that draw completions."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_qrl.rollout.diffusion.engine import DiffusionEngine
    from lit_qrl.rollout.embedded.engine import TransformersEngine
    from lit_qrl.rollout.engine import RolloutEngine
    from lit_qrl.rollout.vllm.engine import VLLMEngine

__all__ = ["DiffusionEngine", "RolloutEngine", "TransformersEngine", "VLLMEngine"]
PLACES = {
    "DiffusionEngine": "diffusion.engine",
    "RolloutEngine": "engine",
    "TransformersEngine": "embedded.engine",
    "VLLMEngine": "vllm.engine",
}


def __getattr__(name: str) -> Any:
    """Return an engine's class when it is asked for: what names vLLM's versions or patches loads no engine."""
    if name not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{PLACES[name]}"), name)
    globals()[name] = found
    return found
