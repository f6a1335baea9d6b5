"""A reload does not declare again what the packing of a layer had released, in layers that got nothing.

Their methods ask whether the parameter is None, and find no such attribute.
"""

from typing import Any

from torch import nn

from lit_qrl.rollout.vllm.locations import checkpoint_names
from lit_qrl.rollout.vllm.patches.patch import Patch, Versions


def declare(model: nn.Module) -> None:
    """Declare as None what the loader of a layer fills and the layer does not have."""
    for module in model.modules():
        if hasattr(module, "quant_method"):
            for name in checkpoint_names(module):
                if not hasattr(module, name):
                    module.register_parameter(name, None)


def _declaring(original: Any) -> Any:
    def finalize(model: nn.Module, *args: Any, **options: Any) -> None:
        original(model, *args, **options)
        declare(model)

    return finalize


PATCH = Patch(
    __name__,
    Versions("0.26"),
    "a reload puts back parameters that were None",
    {"vllm.model_executor.model_loader.reload:finalize_layerwise_reload": _declaring},
    ["vllm.model_executor.model_loader.reload.layerwise:get_layerwise_info"],
)
