"""The handle of the CPU's INT8 GEMM holds a bare pointer to the scales, which a reload frees: NaN from then on."""

from typing import Any

from torch import Tensor

from lit_qrl.rollout.vllm.patches.patch import Patch, Versions


def keeping_operands(original: Any) -> Any:
    """Return the function that makes a handle, which then keeps weight and scales alive."""

    def create(weight: Tensor, scales: Tensor, *args: Any) -> Any:
        handle = original(weight, scales, *args)
        handle.operands = weight, scales
        return handle

    return create


PATCH = Patch(
    __name__,
    Versions("0.26"),
    "the handle owns its operands, or a reload makes a new one",
    {"vllm._custom_ops:create_onednn_scaled_mm": keeping_operands},
    device="cpu",
)
