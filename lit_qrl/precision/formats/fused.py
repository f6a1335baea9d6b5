"""Quantizers in one pass over memory, where Triton is there; the same numbers from plain torch operations elsewhere."""

from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_qrl.precision.formats import activations
from lit_qrl.precision.formats.numerics import E4M3_MAX

BLOCK = 128


@lru_cache
def _triton_installed() -> bool:
    return find_spec("triton") is not None


def available(x: Tensor) -> bool:
    """Return True when the fused kernels can run on `x`."""
    return x.device.type == "cuda" and _triton_installed()


def e4m3_tiles(
    x: Tensor, rows: bool, columns: bool
) -> tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None]:
    """Return `x` ("m k") as E4M3 with a scale per 1×128 along k, and its transpose along m, as asked for.

    Args:
        x: "m k", a floating dtype; k a multiple of 128.
        rows: make (codes "m k", scales "m k/128").
        columns: make (codes "k m", scales "k m/128"), m padded with zeros to a multiple of 128.
    """
    if available(x):
        from lit_qrl.precision.formats import fused_triton

        return fused_triton.e4m3_tiles(x, rows, columns)
    along = activations.e4m3_group_codes(x, BLOCK) if rows else None
    across = None
    if columns:
        across = activations.e4m3_group_codes(F.pad(x.t(), (0, -x.shape[0] % BLOCK)), BLOCK)
    return along, across


def e4m3_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes "m k" and scales "m 1" of `x` ("m k") as E4M3 with a scale per row."""
    if available(x):
        from lit_qrl.precision.formats import fused_triton

        return fused_triton.e4m3_tokens(x)
    scale = activations.dynamic_scale(x, -1, E4M3_MAX)
    return activations.e4m3_codes(x, scale), scale


def e4m3_whole(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes "m k" and one scale of `x` ("m k") as E4M3."""
    scale = activations.dynamic_scale(x, None, E4M3_MAX)
    return activations.e4m3_codes(x, scale), scale


def fp8_blocks(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return codes and scales of `FP8Block.quantize` from one kernel, or None where there is none."""
    if not available(weight):
        return None
    from lit_qrl.precision.formats import fused_triton

    return fused_triton.fp8_blocks(weight)


def int4_groups(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor] | None:
    """Return codes and scales of `Int4Group.quantize` from one kernel, or None where there is none."""
    if not available(weight) or not _power_of_two(group_size):
        return None
    from lit_qrl.precision.formats import fused_triton

    return fused_triton.int4_groups(weight, group_size)


def int4_values(codes: Tensor, scales: Tensor, group_size: int, dtype: torch.dtype) -> Tensor | None:
    """Return the weight of `Int4Group.dequantize` from one kernel, or None where there is none."""
    if not available(codes) or not _power_of_two(group_size):
        return None
    from lit_qrl.precision.formats import fused_triton

    return fused_triton.int4_values(codes, scales, group_size, dtype)


def _power_of_two(size: int) -> bool:
    return size & (size - 1) == 0
