"""NF4 in vLLM: what a model's folder says of it, its GEMM, and the method by which vLLM knows both.

W = code[c] · amax of 64 weights (QLoRA, arXiv:2305.14314). vLLM's own method reads scales from files of bitsandbytes
alone, so that nothing can be published into it, and vLLM 0.32 has none. This one holds codes and scales as parameters,
which every loader and receipt sees. A few rows go through bitsandbytes' kernel where that is installed, which reads the
codes alone; for more, and elsewhere, the weight is multiplied out before the GEMM.
"""

import importlib.util
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_qrl.errors import ConfigError
from lit_qrl.formats.base import QuantizedWeight
from lit_qrl.formats.kernels import dispatch
from lit_qrl.formats.nf4 import BLOCK, NF4, TABLE
from lit_qrl.network.linears import quantizable_linears

if TYPE_CHECKING:
    from lit_qrl.formats.base import NumberFormat

NAME = "lit_qrl_nf4"
FEW_ROWS = 4
"""Rows for which bitsandbytes' kernel is faster: 1.3 to 2.5 × at 1 and 2 on an H200, 0.5 to 1.2 × at 8."""


def quantization_config(format: "NumberFormat", plain: Sequence[str]) -> dict[str, Any]:
    """Return the `quantization_config` of an engine's model folder: the format's own but for NF4.

    Args:
        format: of the quantized layers.
        plain: names of layers that stay unquantized.

    >>> quantization_config(NF4(), ["lm_head"])
    {'quant_method': 'lit_qrl_nf4', 'ignore': ['lm_head']}
    """
    if isinstance(format, NF4):
        return {"quant_method": NAME, "ignore": list(plain)}
    return format.quantization_config(plain)


def check_shapes(network: nn.Module, exclude: Collection[str]) -> None:
    """Raise `ConfigError` for a layer whose rows are no whole number of blocks, which a fused layer cannot hold."""
    for name, layer in quantizable_linears(network, exclude).items():
        if layer.in_features % BLOCK:
            raise ConfigError(
                f"{name} does not fit nf4 in vLLM.",
                expected=f"in_features that are a multiple of {BLOCK}",
                given=layer.in_features,
                remedy="Exclude the layer, or use TransformersEngine.",
            )


@lru_cache
def _has_bitsandbytes(device: str) -> bool:
    return device == "cuda" and importlib.util.find_spec("bitsandbytes") is not None


@lru_cache
def table(device: torch.device) -> Tensor:
    """Return NF4's 16 values on a device."""
    return torch.tensor(TABLE, dtype=torch.float32, device=device)


@torch.library.custom_op("lit_qrl::nf4_linear", mutates_args=())
def linear(x: Tensor, codes: Tensor, amax: Tensor) -> Tensor:
    """Return `x @ W.T`: "... in" -> "... out", in the dtype of `x`.

    Args:
        x: inputs.
        codes: two per byte, "out in/2".
        amax: fp32 scales, "out in/64".
    """
    shape = (codes.shape[0], codes.shape[1] * 2)
    flat, scales = codes.reshape(-1, 1), amax.reshape(-1)
    if x.numel() <= FEW_ROWS * shape[1] and x.dtype != torch.float32 and _has_bitsandbytes(x.device.type):
        from bitsandbytes import matmul_4bit
        from bitsandbytes.functional import QuantState

        state = QuantState(scales, torch.Size(shape), table(x.device), BLOCK, "nf4", x.dtype)
        return matmul_4bit(x.reshape(-1, shape[1]), flat.t(), state).view(*x.shape[:-1], shape[0])
    weight = dispatch.nf4_values(flat, scales, BLOCK, shape, x.dtype, table(codes.device))
    if weight is None:
        weight = NF4().dequantize(QuantizedWeight(flat, scales, None, NF4(), shape), x.dtype)
    return F.linear(x, weight)


@linear.register_fake
def _(x: Tensor, codes: Tensor, amax: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], codes.shape[0])


def register() -> None:
    """Make vLLM know the method, by its own interface; again, it changes nothing."""
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
