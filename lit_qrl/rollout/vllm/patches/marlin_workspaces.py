"""Marlin's lock memory is allocated anew in each reload while CUDA graphs go on using the freed one, and hang.

Here every Marlin layer of a device has the same, before and after a reload.
"""

from typing import Any

import torch
from torch import Tensor

from lit_qrl.rollout.vllm.patches.patch import Patch, Versions

_MODULES = (
    "vllm.model_executor.layers.quantization.utils.marlin_utils",
    "vllm.model_executor.layers.quantization.utils.marlin_utils_fp4",
    "vllm.model_executor.layers.quantization.utils.marlin_utils_fp8",
    "vllm.model_executor.kernels.linear.mixed_precision.marlin",
)
_made: dict[tuple[Any, ...], Tensor] = {}


def shared(original: Any) -> Any:
    """Return the function that makes lock memory, once per device and size."""

    def make(device: torch.device, max_blocks_per_sm: int = 1) -> Tensor:
        key = str(device), max_blocks_per_sm
        if key not in _made:
            _made[key] = original(device, max_blocks_per_sm)
        return _made[key]

    return make


def unlock() -> None:
    """Reset the locks: memory that slept comes back with arbitrary contents."""
    for workspace in _made.values():
        workspace.zero_()


def forget() -> None:
    """Let the next engine make its own."""
    _made.clear()


PATCH = Patch(
    __name__,
    Versions("0.26", "0.32"),
    "vLLM keeps one workspace per device (its #48438, in 0.32)",
    {f"{name}:marlin_make_workspace_new": shared for name in _MODULES},
)
