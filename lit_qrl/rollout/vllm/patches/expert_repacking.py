"""Marlin's repacking of a layer's experts goes through all of them in one launch.

vLLM repacks one expert after another, with a launch and a copy for each of its weights, and for its scales an index
that it makes as a list and sends to the device, where the host waits: 12,288 times in a publish of Qwen3-30B-A3B's
shape. The kernel goes by tiles of 16 inputs and knows no expert, so that experts which lie one after another along
their inputs are one matrix to it; the scales' order is within a row.
"""

from collections.abc import Mapping
from inspect import signature
from typing import Any

from torch import Tensor

from lit_qrl.rollout.vllm.patches.nvfp4_repacking import permuted_scales
from lit_qrl.rollout.vllm.patches.patch import Patch, Versions

_MOST = 2**31 - 1
"""Numbers that the kernel's 32-bit indices reach."""


def _apart(given: Mapping[str, Any], weight: Tensor) -> bool:
    """Return whether experts go one by one: each with an order of inputs of its own, or too many for one launch."""
    order = given.get("perm")
    return (order is not None and order.numel() > 0) or weight.numel() > _MOST


def _of_integers(original: Any) -> Any:
    bind = signature(original).bind

    def gptq_marlin_moe_repack(*args: Any, **kwargs: Any) -> Tensor:
        given = bind(*args, **kwargs).arguments
        weight: Tensor = given["b_q_weight"]  # "experts in/8 out" of 4 bits
        if _apart(given, weight):
            return original(**given)
        count = len(weight)
        given |= {"b_q_weight": weight.reshape(1, -1, weight.shape[2]), "size_k": count * given["size_k"]}
        return original(**given).unflatten(1, (count, -1))[0]

    return gptq_marlin_moe_repack


def _of_floats(original: Any) -> Any:
    bind = signature(original).bind

    def repack_marlin_experts(*args: Any, **kwargs: Any) -> Tensor:
        given = bind(*args, **kwargs).arguments
        weight: Tensor = given["weight"]  # "experts out in/2", two numbers a byte
        if _apart(given, weight):
            return original(**given)
        count, rows, _ = weight.shape
        side_by_side = weight.transpose(0, 1).reshape(1, rows, -1)
        given |= {"weight": side_by_side, "size_k": count * given["size_k"]}
        return original(**given).unflatten(1, (count, -1))[0]

    return repack_marlin_experts


def permuted_stack(s: Tensor, size_k: int, size_n: int, group_size: int, is_a_8bit: bool = False) -> Tensor:
    """Return scales "experts groups n", those of each expert in the order in which Marlin's threads read them.

    >>> import torch
    >>> permuted_stack(torch.arange(128.0).view(2, 1, 64), 32, 64, 16)[1, 0, :4].tolist()
    [64.0, 72.0, 80.0, 88.0]
    """
    return permuted_scales(s.flatten(0, 1), size_k, size_n, group_size, is_a_8bit).view(s.shape)


PATCH = Patch(
    __name__,
    Versions("0.26"),
    "vLLM repacks the experts of a layer at once",
    {
        "vllm._custom_ops:gptq_marlin_moe_repack": _of_integers,
        "vllm.model_executor.layers.quantization.utils.marlin_utils_fp4:_repack_marlin_experts": _of_floats,
        "vllm.model_executor.layers.fused_moe.oracle.int_wna16:marlin_moe_permute_scales": lambda original: (
            permuted_stack
        ),
    },
    device="cuda",
)
