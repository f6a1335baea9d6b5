"""MXFP4, weight only: E2M1 in blocks of 32 with power-of-two scales (OCP microscaling)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_qrl.formats.base import NumberFormat, QuantizedWeight, compressed_tensors_config
from lit_qrl.formats.kernels import dispatch
from lit_qrl.formats.numerics import (
    pack_nibbles,
    power_of_two,
    require_finite,
    to_fp4_codes,
)

BLOCK = 32
_BIAS = 127  # of the E8M0 exponent
NAN = 255  # what its last byte stands for
_LARGEST_EXPONENT = 2  # of an E2M1 number: 6 = 1.5 · 2^2
# Mantissa bits of the weight dtypes, and the integers of their size.
_LAYOUT = {
    torch.float32: (23, torch.int32),
    torch.bfloat16: (7, torch.int16),
    torch.float16: (10, torch.int16),
}


@dataclass(frozen=True)
class MXFP4(NumberFormat):
    """E2M1 weights; a block of 32 shares the scale 2^(floor(log2 amax) − 2), twice that from amax = 1.75 · 2^k on."""

    name: ClassVar[str] = "mxfp4"
    bits_per_weight: ClassVar[float] = 4.0 + 8.0 / BLOCK
    suffixes: ClassVar[tuple[str, ...]] = ("weight_packed", "weight_scale")
    rows_together: ClassVar[int | None] = 1
    inputs_together: ClassVar[int] = BLOCK

    @torch.no_grad()
    def quantize(self, weight: Tensor, shared_amax: Tensor | None = None) -> QuantizedWeight:
        """Return codes "out in/2" (two per byte) and biased exponents "out in/32", uint8.

        >>> q = MXFP4().quantize(torch.linspace(-4, 4, 32).reshape(1, 32))
        >>> q.scales.item() - 127
        0
        """
        self.check("This weight", (weight.shape[0], weight.shape[1]))
        if weight.dtype not in _LAYOUT:
            weight = weight.float()
        blocks = weight.detach().unflatten(-1, (-1, BLOCK))
        amax = blocks.abs().amax(dim=-1)
        require_finite(amax)
        scale = _scale(amax)
        exponent = (torch.frexp(scale.float()).exponent - 1 + _BIAS).to(torch.uint8)
        codes = to_fp4_codes(blocks / scale.unsqueeze(-1)).flatten(-2)
        return QuantizedWeight(pack_nibbles(codes), exponent, None, self, (weight.shape[0], weight.shape[1]))

    def dequantize(self, q: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
        return dispatch.packed_values(q, BLOCK, "FP4", dtype)

    def quantization_config(self, ignore: Sequence[str] = ("lm_head",)) -> dict[str, Any]:
        weights = {
            "num_bits": 4,
            "type": "float",
            "strategy": "group",
            "group_size": BLOCK,
            "scale_dtype": "torch.uint8",
        }
        return compressed_tensors_config("mxfp4-pack-quantized", weights=weights, ignore=ignore)


def _scale(amax: Tensor) -> Tensor:
    """Return the power of two that a block is divided by, in the dtype of `amax`."""
    mantissa, integer = _LAYOUT[amax.dtype]
    # A quarter of the mantissa's range carries amax ≥ 1.75 · 2^k over to 2^(k+1), since 1.75 · 4 = 7 saturates at 6.
    # Clearing the mantissa leaves the power of two; a subnormal amax becomes 0.
    raised = amax.view(integer) + (1 << (mantissa - 2))
    power = (raised & ~((1 << mantissa) - 1)).view(amax.dtype)
    exponent = torch.frexp(power.float()).exponent - 1 - _LARGEST_EXPONENT
    exponent = torch.where(power == 0, -_BIAS, exponent.clamp(-_BIAS, NAN - 1 - _BIAS))
    scale = power_of_two((exponent + _BIAS).to(torch.uint8)).to(amax.dtype)
    # 2^-127 is below what fp16 can hold; compressed-tensors stores a scale of 1 then.
    return torch.where(scale == 0, torch.ones_like(scale), scale)
