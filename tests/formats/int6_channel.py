"""A number format that the library does not have, in one file: 6-bit integers with a scale per output channel."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from lit_qrl.formats import FormatSupport, NumberFormat, QuantizedWeight
from lit_qrl.formats.base import compressed_tensors_config
from lit_qrl.formats.numerics import require_finite, scale_from_amax

ROW = FormatSupport()
"""Its row of the table: vLLM and the learner's kernels know nothing of it."""


@dataclass(frozen=True)
class Int6Channel(NumberFormat):
    """Signed 6-bit weights with a scale amax/31.5 per output channel; four codes are three bytes."""

    name: ClassVar[str] = "int6_channel"
    bits_per_weight: ClassVar[float] = 6.0
    suffixes: ClassVar[tuple[str, ...]] = ("weight_packed", "weight_scale")
    rows_together: ClassVar[int | None] = 1
    inputs_together: ClassVar[int] = 4

    @torch.no_grad()
    def quantize(self, weight, shared_amax=None):
        self.check("This weight", tuple(weight.shape))
        amax = weight.detach().abs().amax(dim=1, keepdim=True)
        require_finite(amax)
        scale = scale_from_amax(amax, 31.5)
        codes = (weight.detach() / scale).clamp(-32, 31).round().to(torch.int32) + 32
        shifts = torch.tensor([0, 6, 12, 18], dtype=torch.int32, device=codes.device)
        words = (codes.unflatten(-1, (-1, 4)) << shifts).sum(-1)
        three = torch.stack([(words >> shift) & 0xFF for shift in (0, 8, 16)], dim=-1).flatten(-2)
        return QuantizedWeight(three.to(torch.uint8), scale, None, self, (weight.shape[0], weight.shape[1]))

    def dequantize(self, q, dtype=torch.float32):
        low, middle, high = q.codes.to(torch.int32).unflatten(-1, (-1, 3)).unbind(-1)
        words = low | middle << 8 | high << 16
        codes = torch.stack([(words >> shift) & 0x3F for shift in (0, 6, 12, 18)], dim=-1).flatten(-2) - 32
        return (codes.float() * q.scales.float()).to(dtype)

    def scale_shape(self, shape):
        return shape[0], 1

    def quantization_config(self, ignore=("lm_head",)):
        weights = {"num_bits": 6, "type": "int", "strategy": "channel"}
        return compressed_tensors_config("pack-quantized", weights=weights, ignore=ignore)
