"""vLLM as a rollout engine."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_qrl.rollout.vllm.engine import VLLMEngine

__all__ = ["VLLMEngine"]


def __getattr__(name: str) -> Any:
    """Return the engine's class when it is asked for; its versions, patches and watchdog load no engine."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lit_qrl.rollout.vllm.engine import VLLMEngine

    globals()[name] = VLLMEngine
    return VLLMEngine
