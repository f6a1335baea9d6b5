"""On CPU a reload takes an existing kernel of the experts as a sign that nothing is left to pack.

It then goes on multiplying with the old weights. 0.26 packs them every time.
"""

from typing import Any

from torch import nn

from lit_qrl.rollout.vllm.patches.patch import Patch, Versions


def forget_kernels(model: nn.Module) -> None:
    """Make the experts pack on the next reload."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if type(module).__name__ == "RoutedExperts" and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _forgetful(original: Any) -> Any:
    def initialize(model: nn.Module) -> None:
        forget_kernels(model)
        original(model)

    return initialize


PATCH = Patch(
    __name__,
    Versions("0.27"),
    "the CPU build packs experts in every reload again",
    {"vllm.model_executor.model_loader.reload:initialize_layerwise_reload": _forgetful},
    [
        "vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts",
        "vllm.model_executor.layers.fused_moe.fused_moe_method_base:FusedMoEMethodBase.moe_kernel",
    ],
    device="cpu",
)
