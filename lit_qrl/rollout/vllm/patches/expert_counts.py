"""A reload runs the loader of each expert's tensor twice, first on nothing to count what it would write.

The dry run is a third of what the first publish of a mixture does for each tensor. One that belongs to one expert is
written whole where a process holds all experts whole, so that its size is the count.
"""

from inspect import BoundArguments
from typing import Any

from torch import Tensor

from lit_qrl.rollout.vllm.patches.patch import Patch, Versions

_LAYERWISE = "vllm.model_executor.model_loader.reload.layerwise"


def _known(original: Any) -> Any:
    def get_numel_loaded(weight_loader: Any, args: BoundArguments) -> tuple[int, Any]:
        given = args.arguments
        tensor = given.get("loaded_weight")
        if isinstance(tensor, Tensor) and _writes_whole(getattr(weight_loader, "__self__", None), tensor, given):
            return tensor.numel(), True if given.get("return_success") else None
        return original(weight_loader, args)

    return get_numel_loaded


def _writes_whole(experts: Any, tensor: Tensor, given: dict[str, Any]) -> bool:
    """Return whether a module of experts is given a matrix, or its scales, of one, and holds all of each."""
    return (
        type(experts).__name__ == "RoutedExperts"
        and given.get("shard_id") in ("w1", "w2", "w3")
        and tensor.ndim <= 2
        and experts.local_num_experts == experts.global_num_experts
        and experts.moe_config.tp_size == 1
    )


PATCH = Patch(
    __name__,
    Versions("0.26"),
    "a reload counts without a dry run of each loader",
    {f"{_LAYERWISE}:get_numel_loaded": _known},
    ["vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts.weight_loader"],
)
