"""FP8 E4M3 with a scale per 128×128 block of the weight and per 1×128 of the activations (DeepSeek-V3, Jet-RL)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
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

BLOCK = gemm.BLOCK


@dataclass(frozen=True)
class FP8Block(NumberFormat):
    """E4M3 weights with a scale amax/448 per 128×128 block; activations E4M3 with a scale per 1×128.

    A weight whose sides are no multiple of 128 ends in partial blocks, as in compressed-tensors.
    """

    name: ClassVar[str] = "fp8_block"

    @property
    def quantizes_activations(self) -> bool:
        return True

    @property
    def bits_per_weight(self) -> float:
        return 8.0 + 32.0 / BLOCK**2

    @torch.no_grad()
    def quantize(self, weight: Tensor, shared_amax: Tensor | None = None) -> QuantizedWeight:
        """Return E4M3 codes "out in" and scales "out/128 in/128" in the weight's dtype.

        >>> q = FP8Block().quantize(torch.full((128, 256), 896.0))
        >>> q.codes.float().unique().tolist(), q.scales.tolist()
        ([448.0], [[2.0, 2.0]])
        """
        weight = weight.detach()
        rows, columns = weight.shape
        made = fused.fp8_blocks(weight)
        if made is not None:
            require_finite(made[1])
            return QuantizedWeight(made[0], made[1], None, self, (rows, columns))
        blocks = _blocks(weight)
        amax = blocks.abs().amax(dim=(1, 3))
        require_finite(amax)
        scale = scale_from_amax(amax, E4M3_MAX)
        codes = to_e4m3(blocks / scale[:, None, :, None]).reshape(scale.shape[0] * BLOCK, scale.shape[1] * BLOCK)
        return QuantizedWeight(codes[:rows, :columns].contiguous(), scale, None, self, (rows, columns))

    def dequantize(self, q: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
        assert q.scales is not None
        rows, columns = q.shape
        scale = q.scales.float().repeat_interleave(BLOCK, dim=0)[:rows].repeat_interleave(BLOCK, dim=1)[:, :columns]
        return scale.mul_(q.codes.float()).to(dtype)

    def prepare(self, q: QuantizedWeight, dtype: torch.dtype) -> PreparedWeight:
        assert q.scales is not None
        if gemm.fp8_block_gemm(q.codes.device, q.shape):
            return PreparedWeight(q.codes, gemm.block_scale_layout(q.scales), native=True)
        return PreparedWeight(self.dequantize(q))

    def apply(self, x: Tensor, prepared: PreparedWeight, bias: Tensor | None = None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if prepared.native:
            assert prepared.scale is not None
            (codes, scale), _ = fused.shared_tiles(x, columns=False)
            out = gemm.scaled_mm_block(codes, scale, prepared.operand, prepared.scale, bias, x.dtype)
        else:
            out = F.linear(activations.e4m3_group_dequantized(rows, BLOCK), prepared.operand)
            out = (out if bias is None else out.add_(bias)).to(x.dtype)
        return out.view(*x.shape[:-1], out.shape[-1])

    def export(self, q: QuantizedWeight, name: str) -> Iterator[tuple[str, Tensor]]:
        assert q.scales is not None
        yield f"{name}.weight", q.codes
        yield f"{name}.weight_scale", q.scales

    def load(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantizedWeight:
        scales = tensors["weight_scale"].reshape(ceil(shape[0] / BLOCK), ceil(shape[1] / BLOCK))
        return expect_shape(QuantizedWeight(tensors["weight"], scales, None, self, shape), shape)

    def quantization_config(self, ignore: Sequence[str] = ("lm_head",)) -> dict[str, Any]:
        return compressed_tensors_config(
            "float-quantized",
            weights={"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [BLOCK, BLOCK]},
            activations={"num_bits": 8, "type": "float", "strategy": "group", "group_size": BLOCK},
            ignore=ignore,
        )


def _blocks(weight: Tensor) -> Tensor:
    """Return `weight` padded with zeros and cut into "out/128 128 in/128 128"."""
    rows, columns = weight.shape
    padded = F.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    return padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
