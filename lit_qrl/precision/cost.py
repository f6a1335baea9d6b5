"""What a learner in few bits costs beside one in bf16, as measured; told where it is slower."""

import logging
from functools import lru_cache
from typing import Any

import torch

log = logging.getLogger(__name__)

UPDATES: dict[str, dict[int, float]] = {
    "UnifiedFP8": {1536: 0.90, 3584: 0.79},
    "QATAligned(fp8_row)": {1536: 0.94, 3584: 0.90},
}
"""Time of an iteration's update, 128 completions of 512 tokens in four and in eight micro-batches, to that in bf16, by
the model's hidden size: whole runs on H200s, Qwen2.5's shapes at 1.5B and 7B, 2026-11-23 and 24."""


def tell_cost(learner: str, network: Any, device: torch.device) -> None:
    """Warn, once per process, where a learner was measured to be slower than bf16 at about this model's width.

    Args:
        learner: plugin and, where it has several, format.
        network: a causal language model.
        device: where it is trained; figures are of GPUs alone.
    """
    config = getattr(network, "config", None)
    if device.type == "cuda" and config is not None and learner in UPDATES:
        figures, width = UPDATES[learner], config.get_text_config().hidden_size
        nearest = min(figures, key=lambda known: abs(known - width))
        if figures[nearest] > 1:
            _warn(
                f"{learner} is slower than bf16 here: at a hidden size of {nearest} an update took "
                f"{figures[nearest]:.2f} times as long on an H200. Learner and sampler agree for it; a bf16 learner "
                "with a correction (configs/correction/) is faster."
            )


@lru_cache
def _warn(message: str) -> None:
    log.warning("%s", message)
