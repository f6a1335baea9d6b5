"""FP8 E4M3 with one scale per output row of the weight and one per token."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_qrl.formats import activations
from lit_qrl.formats.base import NumberFormat, PreparedWeight
from lit_qrl.formats.configs import compressed_tensors_config
from lit_qrl.formats.kernels import dispatch as fused
from lit_qrl.formats.kernels import gemm
from lit_qrl.formats.numerics import E4M3_MAX, expect_shape, require_finite, scale_from_amax, to_e4m3
from lit_qrl.types import QuantizedWeight


@dataclass(frozen=True)
class FP8Row(NumberFormat):
    """E4M3 weights with a scale amax/448 per output row; activations E4M3 with a scale per token."""

    name: ClassVar[str] = "fp8_row"

    @property
    def quantizes_activations(self) -> bool:
        return True

    @property
    def bits_per_weight(self) -> float:
        return 8.0

    @torch.no_grad()
    def quantize(self, weight: Tensor, shared_amax: Tensor | None = None) -> QuantizedWeight:
        """Return E4M3 codes "out in" and scales "out 1" in the weight's dtype.

        >>> q = FP8Row().quantize(torch.tensor([[448.0, -1.1], [896.0, 3.0]]))
        >>> q.codes.float().tolist(), q.scales.tolist()
        ([[448.0, -1.125], [448.0, 1.5]], [[1.0], [2.0]])
        """
        weight = weight.detach()
        amax = weight.abs().amax(dim=1, keepdim=True)
        require_finite(amax)
        scale = scale_from_amax(amax, E4M3_MAX)
        return QuantizedWeight(to_e4m3(weight / scale), scale, None, self, (weight.shape[0], weight.shape[1]))

    def dequantize(self, q: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
        assert q.scales is not None
        return (q.codes.float() * q.scales.float()).to(dtype)

    def prepare(self, q: QuantizedWeight, dtype: torch.dtype) -> PreparedWeight:
        assert q.scales is not None
        if gemm.fp8_gemm(q.codes.device, q.shape):
            return PreparedWeight(q.codes, q.scales.float(), native=True)
        return PreparedWeight(self.dequantize(q))

    def apply(self, x: Tensor, prepared: PreparedWeight, bias: Tensor | None = None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if prepared.native:
            assert prepared.scale is not None
            codes, scale = fused.e4m3_tokens(rows)
            out = gemm.scaled_mm(codes, scale, prepared.operand, prepared.scale, bias, x.dtype)
        else:
            scale = activations.dynamic_scale(rows, -1, E4M3_MAX)
            out = F.linear(activations.e4m3_rounded(rows, scale), prepared.operand).mul_(scale)
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
            "float-quantized",
            weights={"num_bits": 8, "type": "float", "strategy": "channel"},
            activations={"num_bits": 8, "type": "float", "strategy": "token"},
            ignore=ignore,
        )
