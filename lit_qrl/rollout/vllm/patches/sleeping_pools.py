"""The worker of an engine that could sleep drops its memory's pools at its end, while tensors still lie in them.

What is freed after that goes through an allocator that is no longer there.
"""

import sys
from typing import Any

from lit_qrl.rollout.vllm.patches.patch import Patch, Versions

MODULE = "vllm.device_allocator.cumem"
_pools: list[Any] = []
_pluggable: list[Any] = []  # for good: they are small, and a late tensor is freed through them


def hold_pools() -> bool:
    """Keep the pools of an engine that is about to be shut down, if it could sleep, and return whether it could."""
    allocator = _allocator()
    if allocator is None:
        return False
    for held in allocator.allocator_and_pools.values():
        for pool, pluggable in held if isinstance(held, list) else [held]:  # of 0.32, of 0.26
            _pools.append(pool)
            _pluggable.append(pluggable)
    return bool(_pools)


def release_pools() -> None:
    """Give back what `hold_pools` kept, once nothing lies in it; the next engine needs an empty allocator."""
    _pools.clear()
    allocator = _allocator()
    if allocator is not None:
        allocator.release_pools()


def _allocator() -> Any:
    return getattr(getattr(sys.modules.get(MODULE), "CuMemAllocator", None), "instance", None)


PATCH = Patch(
    __name__,
    Versions("0.26"),
    "a worker's end keeps the pools until nothing lies in them",
    needs=[f"{MODULE}:CuMemAllocator.{name}" for name in ("instance", "allocator_and_pools", "release_pools")],
    device="cuda",
)
