"""0.26 cannot reload a base through its LoRA wrappers: it raises and leaves the weights on no device.

Later versions can by vLLM's own command, which drops the adapter; `reloading` does neither.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from lit_qrl.rollout.vllm.patches.patch import Patch, Versions


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Put the bare layers in the place of the wrappers inside."""
    wrapped = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in list(parent.named_children())
        if hasattr(child, "lora_a_stacked") or _is_wrapper(child)
    ]
    for parent, name, child in wrapped:
        parent._modules[name] = child.base_layer  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        for parent, name, child in wrapped:
            parent._modules[name] = child


def _is_wrapper(module: nn.Module) -> bool:
    return type(module).__name__.endswith("WithLoRA") and isinstance(getattr(module, "base_layer", None), nn.Module)


_LAYER = "vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA"
PATCH = Patch(
    __name__,
    Versions("0.26"),
    "a reload by layers goes through the wrappers and keeps the adapter",
    needs=[f"{_LAYER}.base_layer", f"{_LAYER}.create_lora_weights.lora_a_stacked"],
)
