"""What an engine leaves behind, so that another one can follow it: its graphs' pool, its sleeping allocator's pools."""

import sys
from typing import Any

_MODULE = "vllm.device_allocator.cumem"
_pools: list[Any] = []
_pluggable: list[Any] = []  # for good: they are small, and a late tensor is freed through them


def map_before_freeing() -> None:
    """Let the memory of an engine that is closed in its sleep be freed, once per process, before the first engine.

    The allocator would unmap again what the sleep unmapped; the driver refuses, and the refusal is raised in the next
    engine's first allocation. Each piece gets memory for the moment, one at a time.
    """
    from importlib import import_module

    cumem: Any = import_module(_MODULE)
    original = cumem.CuMemAllocator._python_free_callback
    if hasattr(original, "maps"):
        return

    def free(allocator: Any, pointer: int) -> Any:
        data = allocator.pointer_to_data.get(pointer)
        if data is not None and data.is_asleep:
            cumem.create_and_map(data.handle)
            data.is_asleep = False
        return original(allocator, pointer)

    free.maps = True  # pyright: ignore[reportFunctionMemberAccess]
    cumem.CuMemAllocator._python_free_callback = free


def hold_pools() -> bool:
    """Keep the pools of an engine that is about to be shut down, if it could sleep, and return whether it could.

    Its worker drops them while tensors still lie in them, and what is freed after that goes through an allocator that
    is no longer there.
    """
    allocator = _allocator()
    if allocator is None:
        return False
    for pool, pluggable in allocator.allocator_and_pools.values():
        _pools.append(pool)
        _pluggable.append(pluggable)
    return bool(_pools)


def release_pools() -> None:
    """Give back what `hold_pools` kept, once nothing lies in it; the next engine needs an empty allocator."""
    _pools.clear()
    allocator = _allocator()
    if allocator is not None:
        allocator.release_pools()


def forget_graph_pool() -> None:
    """Let the next engine capture its graphs in a pool of its own: the platform keeps the name of the last engine's.

    Torch refuses a capture into a pool whose graphs are all gone while some of its memory is not yet given back.
    """
    from vllm.platforms import current_platform

    type(current_platform)._global_graph_pool = None


def _allocator() -> Any:
    return getattr(getattr(sys.modules.get(_MODULE), "CuMemAllocator", None), "instance", None)
