"""Memory of an engine that is closed in its sleep cannot be freed: it is unmapped a second time.

The driver refuses, and the refusal is raised in the next engine's first allocation. Here each piece gets memory for the
moment, one at a time.
"""

from importlib import import_module
from typing import Any

from lit_qrl.rollout.vllm.patches.patch import Patch, Versions
from lit_qrl.rollout.vllm.patches.sleeping_pools import MODULE


def mapping(original: Any) -> Any:
    """Return the allocator's function that frees a piece, which then maps one that sleeps before."""

    def free(allocator: Any, pointer: int) -> Any:
        data = allocator.pointer_to_data.get(pointer)
        if data is not None and data.is_asleep:
            import_module(MODULE).create_and_map(data.handle)
            data.is_asleep = False
        return original(allocator, pointer)

    return free


_FREE = f"{MODULE}:CuMemAllocator._python_free_callback"
PATCH = Patch(
    __name__,
    Versions("0.26"),
    "the allocator frees sleeping memory without unmapping it",
    {_FREE: mapping},
    [f"{MODULE}:CuMemAllocator.pointer_to_data", f"{MODULE}:AllocationData.is_asleep", f"{MODULE}:create_and_map"],
    device="cuda",
)
