"""INT8 with one scale per output channel of the weight and one per token."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_qrl.formats import activations
from lit_qrl.formats.base import NumberFormat, PreparedWeight
from lit_qrl.formats.configs import compressed_tensors_config
from lit_qrl.formats.kernels import gemm
from lit_qrl.formats.numerics import INT8_STEPS, expect_shape, require_finite, scale_from_amax
from lit_qrl.types import QuantizedWeight

_MIN, _MAX = -128, 127


@dataclass(frozen=True)
class Int8Channel(NumberFormat):
    """Signed 8-bit weights with a scale amax/127.5 per output channel; activations INT8 with a scale per token."""

    name: ClassVar[str] = "int8_channel"

    @property
    def quantizes_activations(self) -> bool:
        return True

    @property
    def bits_per_weight(self) -> float:
        return 8.0

    @torch.no_grad()
    def quantize(self, weight: Tensor, shared_amax: Tensor | None = None) -> QuantizedWeight:
        """Return int8 codes "out in" and scales "out 1" in the weight's dtype.

        >>> q = Int8Channel().quantize(torch.tensor([[127.5, -127.5, 1.4], [0.0, 0.0, 0.0]]))
        >>> q.codes.tolist()
        [[127, -128, 1], [0, 0, 0]]
        """
        weight = weight.detach()
        amax = weight.abs().amax(dim=1, keepdim=True)
        require_finite(amax)
        scale = scale_from_amax(amax, INT8_STEPS)
        codes = (weight / scale).clamp_(_MIN, _MAX).round_().to(torch.int8)
        return QuantizedWeight(codes, scale, None, self, (weight.shape[0], weight.shape[1]))

    def dequantize(self, q: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
        assert q.scales is not None
        return (q.codes.float() * q.scales.float()).to(dtype)

    def prepare(self, q: QuantizedWeight, dtype: torch.dtype) -> PreparedWeight:
        assert q.scales is not None
        if gemm.int8_gemm(q.codes.device, q.shape):
            return PreparedWeight(q.codes, q.scales.float(), native=True)
        return PreparedWeight(self.dequantize(q))

    def apply(self, x: Tensor, prepared: PreparedWeight, bias: Tensor | None = None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        scale = activations.dynamic_scale(rows, -1, activations.INT8_ACTIVATION_STEPS)
        rounded = activations.int8_rounded(rows, scale)
        if prepared.native:
            assert prepared.scale is not None
            product = gemm.int_mm(rounded.to(torch.int8), prepared.operand)
            out = product.float().mul_(scale).mul_(prepared.scale.view(1, -1))
        else:
            out = F.linear(rounded, prepared.operand).mul_(scale)
        out = (out if bias is None else out.add_(bias)).to(x.dtype)
        return out.view(*x.shape[:-1], out.shape[-1])

    def export(self, q: QuantizedWeight, name: str) -> Iterator[tuple[str, Tensor]]:
        assert q.scales is not None
        yield f"{name}.weight", q.codes
        yield f"{name}.weight_scale", q.scales

    def load(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantizedWeight:
        scales = tensors["weight_scale"].reshape(shape[0], 1)
        return expect_shape(QuantizedWeight(tensors["weight"], scales, None, self, shape), shape)

    def quantization_config(self, ignore: Sequence[str] = ("lm_head",)) -> dict[str, Any]:
        return compressed_tensors_config(
            "int-quantized",
            weights={"num_bits": 8, "type": "int", "strategy": "channel"},
            activations={"num_bits": 8, "type": "int", "strategy": "token"},
            ignore=ignore,
        )
