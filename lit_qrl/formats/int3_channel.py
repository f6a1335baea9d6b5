"""Symmetric INT3 with a scale per output channel: a format for studies of the mismatch, which no engine multiplies."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_qrl.formats.base import NumberFormat, QuantizedWeight, compressed_tensors_config
from lit_qrl.formats.numerics import require_finite, scale_from_amax

_MIN, _MAX, _STEPS = -4, 3, 3.5
_PER_THREE_BYTES = 8


@dataclass(frozen=True)
class Int3Channel(NumberFormat):
    """Signed 3-bit weights with a scale amax/3.5 per output channel; activations as they are.

    A study format: coarser than what anybody ships, so that on a small policy a mismatch of tenths of a nat per token,
    which large models show in long completions, is had in minutes. The embedded engine and `QATAligned` compute in it;
    vLLM has no kernel, and no library reads a folder in it.
    """

    name: ClassVar[str] = "int3_channel"
    bits_per_weight: ClassVar[float] = 3.0
    suffixes: ClassVar[tuple[str, ...]] = ("weight_packed", "weight_scale")
    rows_together: ClassVar[int | None] = 1
    inputs_together: ClassVar[int] = _PER_THREE_BYTES

    @torch.no_grad()
    def quantize(self, weight: Tensor, shared_amax: Tensor | None = None) -> QuantizedWeight:
        """Return codes "out 3·in/8" (eight in three bytes, the first one lowest) and scales "out 1".

        >>> format = Int3Channel()
        >>> q = format.quantize(torch.tensor([[3.5, -3.5, 1.4, 0.4, 0.0, 0.0, 0.0, 0.0]]))
        >>> format.dequantize(q).tolist()
        [[3.0, -4.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]]
        """
        weight = weight.detach()
        self.check("This weight", (weight.shape[0], weight.shape[1]))
        amax = weight.abs().amax(dim=1, keepdim=True)
        require_finite(amax)
        scale = scale_from_amax(amax, _STEPS)
        codes = (weight / scale).clamp_(_MIN, _MAX).round_().to(torch.int32) - _MIN
        words = (codes.unflatten(-1, (-1, _PER_THREE_BYTES)) << _shifts(3, codes)).sum(-1, keepdim=True)
        packed = ((words >> _shifts(8, codes)) & 0xFF).to(torch.uint8).flatten(-2)
        return QuantizedWeight(packed, scale, None, self, (weight.shape[0], weight.shape[1]))

    def dequantize(self, q: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
        assert q.scales is not None
        three = q.codes.to(torch.int32).unflatten(-1, (-1, 3))
        words = (three << _shifts(8, three)).sum(-1, keepdim=True)
        codes = ((words >> _shifts(3, three)) & 0b111).flatten(-2) + _MIN
        return (codes.float() * q.scales.float()).to(dtype)

    def scale_shape(self, shape: tuple[int, int]) -> tuple[int, ...]:
        return shape[0], 1

    def quantization_config(self, ignore: Sequence[str] = ("lm_head",)) -> dict[str, Any]:
        weights = {"num_bits": 3, "type": "int", "strategy": "channel"}
        return compressed_tensors_config("pack-quantized", weights=weights, ignore=ignore)


def _shifts(bits: int, like: Tensor) -> Tensor:
    """Return the positions in a word of 24 bits of its parts of `bits` each."""
    return torch.arange(0, 24, bits, dtype=torch.int32, device=like.device)
