"""NF4 in vLLM: what a model's folder says of it, and its GEMM; `patches.nf4_method` makes vLLM know both.

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
