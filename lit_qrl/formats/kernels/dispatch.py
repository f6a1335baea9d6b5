"""Quantizers in one pass over memory, where Triton is there; the same numbers from plain torch operations elsewhere."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from lit_qrl.formats.kernels import activations, gemm
from lit_qrl.formats.numerics import (
    E4M3,
    fp4_values,
    in_blocks,
    of_blocks,
    power_of_two,
    unpack_int4,
    unpack_nibbles,
)
from lit_qrl.functional._launch import triton_installed

if TYPE_CHECKING:
    from lit_qrl.formats.base import QuantizedWeight

BLOCK = 128
TILES, TOKENS = "tiles", "tokens"
"""The sources of codes that are kept with a tensor: a scale for each 1×128, or for each row."""
RECIPE = "recipe"
"""The source of h, rstd and weight of a norm's output weight · (h rstd), which products that read it keep instead."""


def available(x: Tensor, kernel: str) -> bool:
    """Return True when our Triton kernel of that name can run on `x`."""
    return x.device.type == "cuda" and triton_installed(kernel)


def available_for_e4m3(x: Tensor, kernel: str) -> bool:
    """Return True when our Triton kernel of that name, which reads or writes E4M3, can run on `x`."""
    return available(x, kernel) and gemm.has_fp8(x.device)


Tile = tuple[Tensor, Tensor]
"""Codes, and the scales along their last dimension."""


class _Kept(NamedTuple):
    source: str
    version: int
    along: Any
    across: Any


_notes = WeakTensorKeyDictionary()
"""What is kept for tensors, for as long as they live."""


def made_once(x: Tensor, source: str, columns: bool, make: Callable[[bool], tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return what `make(columns)` makes of `x`, made once for all layers that read the same tensor.

    It is kept for as long as the tensor lives and is not written to.

    Args:
        x: the layers' input.
        source: who made it; another's is not taken.
        columns: whether the transpose is needed too.
        make: from `columns` to both; the second may be None.
    """
    # neither a tensor under inference mode nor one that is traced counts its writes
    if torch.compiler.is_compiling() or x.is_inference():
        return make(columns)
    found = kept(x, source)
    if found is None or (columns and found.across is None):
        found = _notes[x] = _Kept(source, x._version, *make(columns))
    return found.along, found.across


def keep(x: Tensor, source: str, along: Any, across: Any = None) -> None:
    """Let `made_once` and `kept` find what the operator before made together with `x`."""
    if not x.is_inference():
        _notes[x] = _Kept(source, x._version, along, across)


def kept(x: Tensor, source: str) -> _Kept | None:
    """Return what a source has kept with `x`, or None where it did not, or `x` was written to since."""
    found: _Kept | None = _notes.get(x)
    return found if found is not None and (found.source, found.version) == (source, x._version) else None


def kept_tiles(x: Tensor, columns: bool) -> tuple[Tile, Tile | None]:
    """Return `e4m3_tiles` of `x` ("... k") along its rows and, if asked for, its columns, as `made_once` keeps them."""

    def make(columns: bool) -> tuple[Tile | None, Tile | None]:
        return e4m3_tiles(x.detach().reshape(-1, x.shape[-1]), True, columns)

    return made_once(x, TILES, columns, make)


def e4m3_tiles(x: Tensor, rows: bool, columns: bool) -> tuple[Tile | None, Tile | None]:
    """Return `x` ("m k") as E4M3 with a scale per 1×128 along k, and its transpose along m, as asked for.

    Args:
        x: "m k", a floating dtype; k a multiple of 128.
        rows: make (codes "m k", scales "m k/128").
        columns: make (codes "k m", scales "k m/128"), m padded with zeros to a multiple of 128.
    """
    if available_for_e4m3(x, "tiles") and x.element_size() == 2:  # its division is right for so few digits
        from lit_qrl.formats.kernels import tiles_triton

        return tiles_triton.tiles(x, rows, columns)[1:]
    along = activations.e4m3_codes(x, (1, BLOCK)) if rows else None
    across = None
    if columns:
        across = activations.e4m3_codes(F.pad(x.t(), (0, -x.shape[0] % BLOCK)), (1, BLOCK))
    return along, across


def e4m3_inputs(x: Tensor, per_token: bool) -> tuple[Tensor, Tensor]:
    """Return codes "m k" of `x` ("m k") as E4M3, and their scales: one per row, "m 1", or one number."""
    if available_for_e4m3(x, "tokens"):
        from lit_qrl.formats.kernels import fp8_triton

        return fp8_triton.e4m3_tokens(x) if per_token else fp8_triton.e4m3_whole(x)
    codes, scale = activations.e4m3_codes(x, (1 if per_token else x.shape[0], x.shape[1]))
    return codes, scale if per_token else scale.reshape(())


def transposed(codes: Tensor) -> Tensor:
    """Return codes "n k" of one byte as "k n", contiguous."""
    if not (available(codes, "transposed") and codes.is_contiguous()):
        return codes.t().contiguous()
    from lit_qrl.formats.kernels import transposed_triton

    return transposed_triton.transposed(codes)


def fp8_weights(weight: Tensor, kernel: Literal["fp8_blocks", "fp8_rows"]) -> tuple[Tensor, Tensor] | None:
    """Return codes and scales of `FP8Block` or `FP8Row` from one kernel, or None where there is none."""
    if not available_for_e4m3(weight, "fp8_weights"):
        return None
    from lit_qrl.formats.kernels import fp8_triton

    return getattr(fp8_triton, kernel)(weight)


def int4_groups(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor] | None:
    """Return codes and scales of `Int4Group.quantize` from one kernel, or None where there is none."""
    if not available(weight, "int4_weights") or group_size & (group_size - 1):  # no power of two
        return None
    from lit_qrl.formats.kernels import values_triton

    return values_triton.int4_groups(weight, group_size)


def scaled_values(codes: Tensor, scales: Tensor, dtype: torch.dtype, block: tuple[int, int]) -> Tensor:
    """Return codes of a byte times their scales, rounded once.

    Args:
        codes: E4M3 or int8, "rows columns".
        scales: one for each block, or one.
        dtype: of the numbers.
        block: rows and columns that a scale covers.
    """
    if available_for_e4m3(codes, "values") if codes.dtype == E4M3 else available(codes, "values"):
        from lit_qrl.formats.kernels import values_triton

        return values_triton.scaled_values(codes, scales, dtype, block)
    # 16 bits hold the codes exactly, so this rounds once, and needs no copy of them in fp32
    scales = (scales.reshape(1, 1) if scales.numel() == 1 else scales).float()
    return of_blocks(in_blocks(codes.to(dtype), block).mul_(scales[:, None, :, None]), codes.shape)


def packed_values(
    q: "QuantizedWeight",
    block: int,
    kind: Literal["INT4", "FP4", "NF4"],
    dtype: torch.dtype,
    table: Tensor | None = None,
) -> Tensor:
    """Return the weight that packed 4-bit codes and their scales stand for.

    Args:
        q: codes, two in a byte; scales, one per `block` weights in their order: E4M3, exponents (E8M0), or floating
            point; their divisor in `global_scale`. Or a stack of such weights, a divisor for each.
        block: weights that share a scale.
        kind: what a code means.
        dtype: of the weight.
        table: the 16 numbers of NF4.
    """
    codes, scales, divisor = q.codes, q.scales, q.global_scale
    assert scales is not None
    shape = q.shape if codes.ndim == 2 else (len(codes), *q.shape)
    if available_for_e4m3(codes, "values") if scales.dtype == E4M3 else available(codes, "values"):
        from lit_qrl.formats.kernels import values_triton

        return values_triton.values(codes, scales, block, getattr(values_triton, kind), shape, dtype, divisor, table)
    if kind == "INT4":
        numbers = unpack_int4(codes).float()
    elif table is None:
        numbers = fp4_values(unpack_nibbles(codes))
    else:
        numbers = table[torch.stack((codes >> 4, codes & 0x0F), dim=-1).long()]
    scale = power_of_two(scales) if scales.dtype == torch.uint8 else scales.float()
    if divisor is not None:
        scale = scale / divisor.view(-1, *[1] * (scale.ndim - 1))
    return numbers.view(*scale.shape, block).mul_(scale.unsqueeze(-1)).view(shape).to(dtype)
