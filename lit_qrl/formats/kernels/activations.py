"""Dynamic quantization of activations: codes as the GEMM takes them, and fp32 scales.

The scale rules are the engines' (amax/448, amax/127), computed in fp32 from whatever dtype comes in.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_qrl.formats.numerics import E4M3, E4M3_MAX, round_e4m3

# Engines divide int8 activations by amax/127, so that both signs reach their largest code; the 127.5 of
# compressed-tensors holds for weights.
INT8_ACTIVATION_STEPS = 127.0
# A row of zeros: any scale will do that is not zero and whose inverse is finite.
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def dynamic_scale(x: Tensor, dim: int | None, steps: float) -> Tensor:
    """Return the fp32 scale of `x` ("m k"): one number for `dim=None`, else one per slice along `dim` (kept).

    >>> dynamic_scale(torch.tensor([[448.0, -896.0]]), -1, 448.0).tolist()
    [[2.0]]
    """
    magnitude = x.detach().abs()
    amax = (magnitude.amax() if dim is None else magnitude.amax(dim=dim, keepdim=True)).float()
    # On CUDA, torch divides by a number as it multiplies by its inverse, which is another scale in one case of three;
    # a divisor on the device is divided by.
    divisor = steps if amax.device.type == "cpu" else torch.full((), steps, device=amax.device)
    return (amax / divisor).clamp_min_(_SMALLEST_SCALE)


def e4m3_codes(x: Tensor, scale: Tensor) -> Tensor:
    """Return `x / scale` ("m k") as float8_e4m3fn."""
    return (x.float() / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)


def e4m3_rounded(x: Tensor, scale: Tensor) -> Tensor:
    """Return `x / scale` ("m k") rounded to E4M3 numbers, in fp32: for emulation."""
    # No clamp: |x| ≤ 448 · scale by construction, and what fp32 rounding adds to that rounds back to 448.
    return round_e4m3(x.float() / scale)


def e4m3_groups(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return `x` ("m k", k padded with zeros) cut into groups "m k/g g", fp32, and their scales "m k/g 1"."""
    padding = -x.shape[-1] % group
    padded = F.pad(x, (0, padding)) if padding else x
    groups = padded.float().unflatten(-1, (-1, group))
    return groups, dynamic_scale(groups, -1, E4M3_MAX)


def e4m3_group_codes(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return float8_e4m3fn codes "m k" of `x` with a scale per 1×`group`, and the scales "m k/g"."""
    groups, scale = e4m3_groups(x, group)
    codes = (groups / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return codes.flatten(-2)[..., : x.shape[-1]], scale.squeeze(-1)


def e4m3_group_dequantized(x: Tensor, group: int) -> Tensor:
    """Return `x` ("m k") rounded to E4M3 with a scale per 1×`group`, multiplied out again in fp32: for emulation."""
    groups, scale = e4m3_groups(x, group)
    return round_e4m3(groups / scale).mul_(scale).flatten(-2)[..., : x.shape[-1]]


def int8_rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return `x` ("m k") under a scale for each row as integers in −127 … 127, in fp32, and the scales "m 1"."""
    scale = dynamic_scale(x, -1, INT8_ACTIVATION_STEPS)
    return (x.float() / scale).round_(), scale
