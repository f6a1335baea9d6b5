"""On a CPU vLLM looks through all modules for kernels to replace, and stumbles over llvmlite's, which have any name.

It does so whenever an engine starts, so that one that looks tokens up (with numba) cannot be built again.
"""

import sys
from collections.abc import Callable
from typing import Any

from lit_qrl.rollout.vllm.patches.patch import Patch, Versions

UNREADABLE = "llvmlite"


def _of_others(original: Callable[..., Any]) -> Callable[..., Any]:
    def rebind(overrides: Any) -> None:
        hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == UNREADABLE}
        try:
            original(overrides)
        finally:
            sys.modules.update(hidden)

    return rebind


PATCH = Patch(
    __name__,
    Versions("0.27"),
    "_rebind_kernels takes a __dict__ that is no mapping for what it is",
    {"vllm.triton_utils.dispatcher:_rebind_kernels": _of_others},
    device="cpu",
)
