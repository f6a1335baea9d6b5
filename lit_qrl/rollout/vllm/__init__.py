"""vLLM as a rollout engine."""

from typing import TYPE_CHECKING

from lit_qrl.aliases import offering

if TYPE_CHECKING:
    from lit_qrl.rollout.vllm.engine import VLLMEngine

__all__ = ["VLLMEngine"]

# Its versions, patches and watchdog load no engine.
__getattr__ = offering(__name__, {"VLLMEngine": "engine"})
