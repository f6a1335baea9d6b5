"""vLLM's NF4 reads scales from files of bitsandbytes alone, and 0.32 has none: ours is registered by its interface."""

from typing import Any

import torch
from torch import Tensor, nn

from lit_qrl.rollout.vllm.patches.patch import Patch, Versions


def _register() -> None:
    from lit_qrl.formats.nf4 import BLOCK
    from lit_qrl.rollout.vllm.nf4 import NAME, linear, table

    # Not in the engine's memory, which a sleep may drop, nor while a CUDA graph is captured.
    table(torch.empty(0, device="cuda" if torch.cuda.is_available() else "cpu").device)  # with its index
    from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
    from vllm.model_executor.utils import set_weight_attrs

    if NAME in QUANTIZATION_METHODS:
        return

    class NF4LinearMethod(LinearMethodBase):
        def create_weights(
            self,
            layer: nn.Module,
            input_size_per_partition: int,
            output_partition_sizes: list[int],
            input_size: int,
            output_size: int,
            params_dtype: torch.dtype,
            **extra_weight_attrs: Any,
        ) -> None:
            load = extra_weight_attrs.pop("weight_loader")

            def in_rows(param: Tensor, loaded_weight: Tensor, *part: Any, **named: Any) -> None:  # vLLM's names
                load(param, loaded_weight.reshape(-1, param.shape[1]), *part, **named)

            rows, columns = sum(output_partition_sizes), input_size_per_partition
            for name, width, dtype in (
                ("weight_packed", columns // 2, torch.uint8),
                ("weight_absmax", columns // BLOCK, torch.float32),
            ):
                parameter = nn.Parameter(torch.zeros(rows, width, dtype=dtype), requires_grad=False)
                set_weight_attrs(
                    parameter, {"input_dim": 1, "output_dim": 0, "weight_loader": in_rows, **extra_weight_attrs}
                )
                layer.register_parameter(name, parameter)

        def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
            out = linear(x, layer.weight_packed, layer.weight_absmax)  # pyright: ignore[reportArgumentType]
            return out if bias is None else out + bias

    @register_quantization_config(NAME)
    class NF4Config(QuantizationConfig):
        def __init__(self, ignore: list[str]) -> None:
            super().__init__()
            self.ignore = ignore

        @classmethod
        def get_name(cls) -> Any:
            return NAME

        @classmethod
        def get_supported_act_dtypes(cls) -> list[torch.dtype]:
            return [torch.bfloat16, torch.float16, torch.float32]

        @classmethod
        def get_min_capability(cls) -> int:
            return 70

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> "NF4Config":
            return cls(config["ignore"])

        def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
            if not isinstance(layer, LinearBase):
                return None
            if is_layer_skipped(prefix, self.ignore, self.packed_modules_mapping):
                return UnquantizedLinearMethod()
            return NF4LinearMethod()


_LAYERS = "vllm.model_executor.layers"
PATCH = Patch(
    __name__,
    Versions("0.26"),
    "vLLM has an NF4 that weights can be published into",
    needs=[
        *(f"{_LAYERS}.linear:{name}" for name in ("LinearBase", "LinearMethodBase", "UnquantizedLinearMethod")),
        *(f"{_LAYERS}.quantization:{name}" for name in ("QUANTIZATION_METHODS", "register_quantization_config")),
        f"{_LAYERS}.quantization.base_config:QuantizationConfig",
        f"{_LAYERS}.quantization.utils.quant_utils:is_layer_skipped",
        "vllm.model_executor.utils:set_weight_attrs",
    ],
    also=_register,
)
