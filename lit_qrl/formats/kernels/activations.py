"""Dynamic quantization of activations: codes as the GEMM takes them, and fp32 scales.

The scale rules are the engines' (amax/448, amax/127), computed in fp32 from whatever dtype comes in.
"""

import torch
from torch import Tensor

from lit_qrl.formats.numerics import E4M3, E4M3_MAX, in_blocks, of_blocks, round_e4m3

# Engines divide int8 activations by amax/127, so that both signs reach their largest code; the 127.5 of
# compressed-tensors holds for weights.
INT8_ACTIVATION_STEPS = 127.0
# A row of zeros: any scale will do that is not zero and whose inverse is finite.
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def dynamic_scale(x: Tensor, dim: int | tuple[int, ...], steps: float) -> Tensor:
    """Return an fp32 scale of `x` per slice along `dim`, which is kept.

    >>> dynamic_scale(torch.tensor([[448.0, -896.0]]), -1, 448.0).tolist()
    [[2.0]]
    """
    amax = x.detach().abs().amax(dim=dim, keepdim=True).float()
    # On CUDA, torch divides by a number as it multiplies by its inverse, which is another scale in one case of three;
    # a divisor on the device is divided by.
    divisor = steps if amax.device.type == "cpu" else torch.full((), steps, device=amax.device)
    return (amax / divisor).clamp_min_(_SMALLEST_SCALE)


def _scaled(x: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return `x` ("m k") in blocks of so many rows and columns over their scales, "m/r r k/c c", and the scales."""
    blocks = in_blocks(x.float(), block)
    scale = dynamic_scale(blocks, (1, 3), E4M3_MAX)
    return blocks / scale, scale


def e4m3_codes(x: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return float8_e4m3fn codes "m k" of `x` with a scale per block of rows and columns, and the scales "m/r k/c"."""
    quotient, scale = _scaled(x, block)
    return of_blocks(quotient.clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3), x.shape), scale.squeeze(3).squeeze(1)


def e4m3_rounded(x: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return the numbers of `e4m3_codes` in fp32, and the scales: for emulation."""
    # No clamp: |x| ≤ 448 · scale by construction, and what fp32 rounding adds to that rounds back to 448.
    quotient, scale = _scaled(x, block)
    return of_blocks(round_e4m3(quotient), x.shape), scale.squeeze(3).squeeze(1)


def e4m3_dequantized(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the numbers of `e4m3_codes` times their scales, in fp32: for emulation."""
    quotient, scale = _scaled(x, block)
    return of_blocks(round_e4m3(quotient).mul_(scale), x.shape)


def int8_rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return `x` ("m k") under a scale for each row as integers in −127 … 127, in fp32, and the scales "m 1"."""
    scale = dynamic_scale(x, -1, INT8_ACTIVATION_STEPS)
    return (x.float() / scale).round_(), scale
