"""MXFP8: E4M3 in blocks of 32 with power-of-two scales, weights and activations alike (OCP microscaling)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_qrl.formats.base import NumberFormat, PreparedWeight, QuantizedWeight, compressed_tensors_config
from lit_qrl.formats.mxfp4 import BLOCK, NAN
from lit_qrl.formats.numerics import E4M3, E4M3_MAX, power_of_two, require_finite

_LARGEST_EXPONENT = 8  # of an E4M3 number: 448 = 1.75 · 2^8


@dataclass(frozen=True)
class MXFP8(NumberFormat):
    """E4M3 weights and inputs; a block of 32 along "in" shares the scale X = 2^(floor(log2 amax) − 8).

    OCP Microscaling 1.0, 6.3, and torchao's `ScaleCalculationMode.FLOOR`: P = x / X to nearest even, saturating at
    ±448, so that an amax beyond 1.75 · 2^k loses up to an eighth of itself. X is at least 2^-127; a block with NaN has
    X = NaN. The GEMM is emulated: bf16 and fp32 hold P · X exactly, and products are added up in fp32.

    >>> q = MXFP8().quantize(torch.linspace(-4, 500, 32).reshape(1, 32))
    >>> q.scales.item() - 127, q.codes[0, -1].item()
    (0, 448.0)
    """

    name: ClassVar[str] = "mxfp8"
    bits_per_weight: ClassVar[float] = 8.0 + 8.0 / BLOCK
    quantizes_activations: ClassVar[bool] = True
    rows_together: ClassVar[int | None] = 1
    inputs_together: ClassVar[int] = BLOCK

    @torch.no_grad()
    def quantize(self, weight: Tensor, shared_amax: Tensor | None = None) -> QuantizedWeight:
        """Return codes "out in" and biased exponents "out in/32", uint8."""
        shape = (weight.shape[0], weight.shape[1])
        self.check("This weight", shape)
        require_finite(weight.abs().amax())
        return QuantizedWeight(*_codes(weight), None, self, shape)

    def dequantize(self, q: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
        assert q.scales is not None
        return _values(q.codes, q.scales, dtype)

    def apply(self, x: Tensor, prepared: PreparedWeight, bias: Tensor | None = None) -> Tensor:
        return F.linear(self.dequantized_input(x), prepared.operand, bias)

    def dequantized_input(self, x: Tensor) -> Tensor:
        return _values(*_codes(x), x.dtype)

    def quantization_config(self, ignore: Sequence[str] = ("lm_head",)) -> dict[str, Any]:
        one = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": BLOCK, "scale_dtype": "torch.uint8"}
        return compressed_tensors_config("mxfp8-quantized", weights=one, activations=one, ignore=ignore)


def _codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes "... in" and biased exponents "... in/32" of a tensor."""
    blocks = x.detach().float().unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(dim=-1)
    biased = (amax.view(torch.int32) >> 23) - _LARGEST_EXPONENT  # fp32 has the bias of E8M0; of a subnormal it is 0
    biased = biased.clamp_(min=0).masked_fill_(amax.isnan(), NAN).to(torch.uint8)
    codes = (blocks / power_of_two(biased).unsqueeze(-1)).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return codes.flatten(-2), biased


def _values(codes: Tensor, biased: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of `_codes`, rounded once."""
    return codes.to(dtype).unflatten(-1, (-1, BLOCK)).mul_(power_of_two(biased).unsqueeze(-1)).flatten(-2)
