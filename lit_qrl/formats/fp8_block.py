"""FP8 E4M3 with a scale per 128×128 block of the weight and per 1×128 of the activations (DeepSeek-V3, Jet-RL)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_qrl.formats.kernels import activations, dispatch, gemm
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
    bits_per_weight: ClassVar[float] = 8.0 + 32.0 / BLOCK**2
    rows_together: ClassVar[int | None] = BLOCK
    kernel = "fp8_blocks"
    codes_of = dispatch.TILES

    def extent(self, shape: tuple[int, int]) -> tuple[int, int]:
        return (BLOCK, BLOCK)

    def input_extent(self, shape: tuple[int, ...]) -> tuple[int, int]:
        return (1, BLOCK)

    def has_gemm(self, device: torch.device, shape: tuple[int, int]) -> bool:
        return gemm.fp8_block_gemm(device, shape)

    def gemm_scales(self, scales: Tensor) -> Tensor:
        return gemm.block_scale_layout(scales)

    def plain_scales(self, scale: Tensor) -> Tensor:
        return scale.t()  # behind them, up to three columns that no block has

    def multiply(self, x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        return gemm.scaled_mm_block(*self.input_codes(x), codes, scale, bias, x.dtype)

    def input_codes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return dispatch.kept_tiles(x, columns=False)[0]

    def emulate(self, rows: Tensor, weight: Tensor) -> Tensor:
        return F.linear(activations.e4m3_dequantized(rows, (1, BLOCK)), weight)

    def kept_input(self, x: Tensor) -> tuple[Tensor, ...]:
        return super().kept_input(x) if x.shape[-1] % BLOCK == 0 else (x,)

    def granularity(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"strategy": "block", "block_structure": [BLOCK, BLOCK]}, {"strategy": "group", "group_size": BLOCK}
