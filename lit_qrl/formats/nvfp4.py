"""NVFP4, weight only: E2M1 in blocks of 16 with E4M3 scales and one fp32 scale over all (QeRL's rollouts).

Four over six: Cook et al., *Four Over Six: More Accurate NVFP4 Quantization with Adaptive Block Scaling*,
arXiv:2512.02010.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_qrl.formats.base import NumberFormat, QuantizedWeight, compressed_tensors_config
from lit_qrl.formats.kernels import dispatch
from lit_qrl.formats.numerics import (
    E4M3,
    E4M3_MAX,
    E4M3_SMALLEST_NORMAL,
    FP4_MAX,
    fp4_values,
    magnitudes,
    pack_nibbles,
    require_finite,
    to_fp4_codes,
)

BLOCK = 16
# A block of zeros gets this scale, E4M3's machine epsilon, so that nothing divides by zero.
_ZERO_BLOCK_SCALE = 0.125
# The largest block scale where a block's largest magnitude may have the code 4 instead of 6: 1.5 times that is 384,
# which E4M3 has.
_FOUR_OVER_SIX_MAX = 256.0


@dataclass(frozen=True)
class NVFP4(NumberFormat):
    """E2M1 weights; value = code · block scale (E4M3) / global scale, which is 448 · 6 / amax.

    Layers that the engine fuses share the amax: vLLM keeps only the largest of their global scales.

    Args:
        four_over_six: give a block's largest magnitude the code 4 instead of 6 where the block's squared error is
            smaller so: no code lies between 4 and 6, and values there are off by most. The global scale is then
            256 · 6 / amax, which leaves room for block scales 1.5 times as large. Engines read the same layout.
    """

    four_over_six: bool = False

    name: ClassVar[str] = "nvfp4"
    bits_per_weight: ClassVar[float] = 4.0 + 8.0 / BLOCK
    suffixes: ClassVar[tuple[str, ...]] = ("weight_packed", "weight_scale", "weight_global_scale")
    shares_amax: ClassVar[bool] = True
    inputs_together: ClassVar[int] = BLOCK

    def dropped(self, q: QuantizedWeight) -> Tensor:
        """Return the magnitude " 1" below which a block's scale is no normal E4M3 number, which Marlin takes for 0.

        >>> f"{NVFP4().dropped(NVFP4().quantize(torch.ones(1, 16))).item():.2e}"  # 6 · 2⁻⁶ / 2688 of the largest
        '3.49e-05'
        """
        assert q.global_scale is not None
        return FP4_MAX * E4M3_SMALLEST_NORMAL / q.global_scale

    @torch.no_grad()
    def quantize(self, weight: Tensor, shared_amax: Tensor | None = None) -> QuantizedWeight:
        """Return codes "out in/2" (two per byte), scales "out in/16" in E4M3 and the global scale " 1" in fp32.

        >>> q = NVFP4().quantize(torch.linspace(0, 6, 16).reshape(1, 16))
        >>> q.scales.float().item(), q.global_scale.item()
        (448.0, 448.0)
        """
        amax = None if shared_amax is None else shared_amax.reshape(1)
        q = self.quantize_stack(weight.unsqueeze(0), amax)
        assert q.scales is not None
        assert q.global_scale is not None
        return QuantizedWeight(q.codes[0], q.scales[0], q.global_scale[0], self, q.shape)

    @torch.no_grad()
    def quantize_stack(self, weights: Tensor, shared_amax: Tensor | None = None) -> QuantizedWeight:
        count, rows, columns = weights.shape
        self.check("This weight", (rows, columns))
        weights = weights.detach()
        shared = None if shared_amax is None else shared_amax.to(weights.device, weights.dtype)
        if dispatch.available_for_e4m3(weights, "fp4_weights") and weights.dtype != torch.float64:
            from lit_qrl.formats.kernels import fp4_triton

            global_scale = self._global_scale(magnitudes(weights) if shared is None else shared)
            packed, scale, bad = fp4_triton.nvfp4_blocks(weights, global_scale, _ZERO_BLOCK_SCALE, self.four_over_six)
            require_finite(bad)
            return QuantizedWeight(packed, scale, global_scale.view(count, 1), self, (rows, columns))
        blocks = weights.unflatten(-1, (-1, BLOCK))
        amax = blocks.abs().amax(dim=-1)
        require_finite(amax)
        global_scale = self._global_scale(amax.amax(dim=(1, 2)) if shared is None else shared)
        one = global_scale.view(count, 1, 1)
        wanted = one * (amax / FP4_MAX)
        scale, codes = _rounded(blocks, wanted, one)
        if self.four_over_six:
            larger, coarser = _rounded(blocks, wanted * (FP4_MAX / 4), one)
            better = _squared_error(blocks, coarser, larger / one) < _squared_error(blocks, codes, scale / one)
            scale, codes = torch.where(better, larger, scale), torch.where(better.unsqueeze(-1), coarser, codes)
        packed = pack_nibbles(codes.flatten(-2))
        return QuantizedWeight(packed, scale.to(E4M3), global_scale.view(count, 1), self, (rows, columns))

    def _global_scale(self, amaxes: Tensor) -> Tensor:
        """Return 448 (or 256) · 6 / amax of each matrix, fp32, divided in the dtype of `amaxes`; 1 for no number."""
        largest = _FOUR_OVER_SIX_MAX if self.four_over_six else E4M3_MAX
        quotient = (largest * FP4_MAX) / amaxes.clamp(min=torch.finfo(amaxes.dtype).tiny)
        return torch.nan_to_num(quotient, nan=1.0, posinf=1.0).to(torch.float32)

    def dequantize_stack(self, q: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.dequantize(q, dtype)

    def dequantize(self, q: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight, or those of a stack, one for each global scale."""
        return dispatch.packed_values(q, BLOCK, "FP4", dtype)

    def quantization_config(self, ignore: Sequence[str] = ("lm_head",)) -> dict[str, Any]:
        weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": BLOCK}
        return compressed_tensors_config("nvfp4-pack-quantized", weights=weights, ignore=ignore)


def _rounded(blocks: Tensor, wanted: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales as fp32 numbers of E4M3 and the codes of the blocks under them, one to an element."""
    scale = wanted.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).float()
    scale = torch.where(scale == 0, _ZERO_BLOCK_SCALE, scale)
    return scale, to_fp4_codes(blocks / (scale / global_scale).unsqueeze(-1))


def _squared_error(blocks: Tensor, codes: Tensor, steps: Tensor) -> Tensor:
    """Return each block's sum of squared errors, in pairs of neighbours, as the kernel on a GPU adds them."""
    error = (fp4_values(codes) * steps.unsqueeze(-1) - blocks).square()
    while error.shape[-1] > 1:
        error = error[..., 0::2] + error[..., 1::2]
    return error.squeeze(-1)
