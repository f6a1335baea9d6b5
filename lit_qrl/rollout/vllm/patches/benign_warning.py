"""A reload warns of every module that has no weights of its own (rotary embeddings) that it received none."""

import logging

from lit_qrl.rollout.vllm.patches.patch import Patch, Versions


def wanted(record: logging.LogRecord) -> bool:
    """Return False for that warning."""
    return "Failed to load weights" not in record.getMessage()


def _quieten() -> None:
    from vllm.model_executor.model_loader.reload import layerwise

    layerwise.logger.addFilter(wanted)


PATCH = Patch(
    __name__,
    Versions("0.26"),
    "a reload warns of modules with weights alone",
    needs=["vllm.model_executor.model_loader.reload.layerwise:logger"],
    also=_quieten,
)
