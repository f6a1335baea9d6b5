"""What is done around a reload and at the end of an engine because vLLM does not do it; no code of its is changed."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lit_qrl.rollout.vllm.patches import CUMEM, workspaces

_pools: list[Any] = []
_pluggable: list[Any] = []  # for good: they are small, and a late tensor is freed through them


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Put the bare layers in the place of their LoRA wrappers inside.

    0.26 cannot reload a base through them: it raises and leaves the weights on no device. Later versions can by
    vLLM's own command, which drops the adapter.
    """
    wrapped = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in list(parent.named_children())
        if hasattr(child, "lora_a_stacked")
        or (type(child).__name__.endswith("WithLoRA") and isinstance(getattr(child, "base_layer", None), nn.Module))
    ]
    for parent, name, child in wrapped:
        parent._modules[name] = child.base_layer  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        for parent, name, child in wrapped:
            parent._modules[name] = child


def forget_kernels(model: nn.Module) -> None:
    """Make experts on a CPU pack on the next reload: their kernel is taken as a sign that nothing is left to pack."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if type(module).__name__ == "RoutedExperts" and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def pack_again(module: nn.Module) -> None:
    """Make a module that shares its parameters with a reloaded one pack them again for the CPU's GEMM."""
    method: Any = getattr(module, "quant_method", None)
    if not torch.cuda.is_available() and method is not None and hasattr(module, "cpu_linear"):
        method.process_weights_after_loading(module)


def unlock_workspaces() -> None:
    """Reset Marlin's locks: memory that slept comes back with arbitrary contents."""
    for workspace in workspaces.values():
        workspace.zero_()


def forget_graph_pool() -> None:
    """Let the next engine capture its CUDA graphs in a pool of its own.

    The platform keeps the name of the last engine's, and torch refuses a capture into a pool whose graphs are all gone
    while some of its memory is not yet given back.
    """
    from vllm.platforms import current_platform

    type(current_platform)._global_graph_pool = None


def hold_pools() -> None:
    """Keep the memory pools of an engine that is about to be shut down, if it could sleep.

    Its worker drops them at its end while tensors still lie in them, and what is freed after that goes through an
    allocator that is no longer there.
    """
    allocator = _allocator()
    if allocator is None:
        return
    for held in allocator.allocator_and_pools.values():
        for pool, pluggable in held if isinstance(held, list) else [held]:  # of 0.32, of 0.26
            _pools.append(pool)
            _pluggable.append(pluggable)
    if _pools:
        workspaces.clear()  # they lie in the pools; no other engine can use them


def release_pools() -> None:
    """Give back what `hold_pools` kept, once nothing lies in it; the next engine needs an empty allocator."""
    _pools.clear()
    allocator = _allocator()
    if allocator is not None:
        allocator.release_pools()


def _allocator() -> Any:
    return getattr(getattr(sys.modules.get(CUMEM), "CuMemAllocator", None), "instance", None)
