"""FP8 E4M3 with a scale per 128×128 block of the weight and per 1×128 of the activations (DeepSeek-V3, Jet-RL)."""

from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_qrl.formats.base import QuantizedWeight
from lit_qrl.formats.kernels import activations, dispatch, gemm
from lit_qrl.formats.numerics import to_e4m3
from lit_qrl.formats.scaled import ScaledE4M3

BLOCK = gemm.BLOCK


@dataclass(frozen=True)
class FP8Block(ScaledE4M3):
    """E4M3 weights with a scale amax/448 per 128×128 block; activations E4M3 with a scale per 1×128.

    A weight whose sides are no multiple of 128 ends in partial blocks, as in compressed-tensors.

    >>> q = FP8Block().quantize(torch.full((128, 256), 896.0))
    >>> q.codes.float().unique().tolist(), q.scales.tolist()
    ([448.0], [[2.0, 2.0]])
    """

    name: ClassVar[str] = "fp8_block"
    rows_together: ClassVar[int | None] = BLOCK
    kernel = "fp8_blocks"

    @property
    def bits_per_weight(self) -> float:
        return 8.0 + 32.0 / BLOCK**2

    def amax(self, weight: Tensor) -> Tensor:
        return _blocks(weight).abs().amax(dim=(1, 3))

    def scale_shape(self, shape: tuple[int, int]) -> tuple[int, ...]:
        return (ceil(shape[0] / BLOCK), ceil(shape[1] / BLOCK))

    def encode(self, weight: Tensor, scale: Tensor) -> Tensor:
        (rows, columns), (down, across) = weight.shape, scale.shape
        codes = to_e4m3(_blocks(weight) / scale[:, None, :, None]).reshape(down * BLOCK, across * BLOCK)
        return codes[:rows, :columns].contiguous()

    def dequantize(self, q: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
        assert q.scales is not None
        made = dispatch.scaled_values(q.codes, q.scales, dtype, (BLOCK, BLOCK))
        if made is not None:
            return made
        rows, columns = q.shape
        if rows % BLOCK == columns % BLOCK == 0:
            blocks = _blocks(q.codes.to(dtype))
            return blocks.mul_(q.scales.float()[:, None, :, None]).view(rows, columns)
        scale = q.scales.float().repeat_interleave(BLOCK, dim=0)[:rows].repeat_interleave(BLOCK, dim=1)[:, :columns]
        return scale.mul_(q.codes.float()).to(dtype)

    def has_gemm(self, device: torch.device, shape: tuple[int, int]) -> bool:
        return gemm.fp8_block_gemm(device, shape)

    def gemm_scales(self, scales: Tensor) -> Tensor:
        return gemm.block_scale_layout(scales)

    def multiply(self, x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        return gemm.scaled_mm_block(*self.input_codes(x), codes, scale, bias, x.dtype)

    def input_codes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return dispatch.kept_tiles(x, columns=False)[0]

    def emulate(self, rows: Tensor, weight: Tensor) -> Tensor:
        return F.linear(activations.e4m3_group_dequantized(rows, BLOCK), weight)

    def kept_input(self, x: Tensor) -> tuple[Tensor, ...]:
        return super().kept_input(x) if x.shape[-1] % BLOCK == 0 else (x,)

    def dequantized_kept(self, kept: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        if len(kept) == 1:
            return activations.e4m3_group_dequantized(kept[0], BLOCK).to(dtype)
        codes, scale = kept
        made = dispatch.scaled_values(codes, scale, dtype, (1, BLOCK))
        if made is not None:
            return made
        return codes.float().unflatten(-1, (-1, BLOCK)).mul_(scale.unsqueeze(-1)).flatten(-2).to(dtype)

    def granularity(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"strategy": "block", "block_structure": [BLOCK, BLOCK]}, {"strategy": "group", "group_size": BLOCK}


def _blocks(weight: Tensor) -> Tensor:
    """Return `weight` padded with zeros and cut into "out/128 128 in/128 128"."""
    rows, columns = weight.shape
    whole = rows % BLOCK == columns % BLOCK == 0
    padded = weight if whole else F.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    return padded.reshape(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
