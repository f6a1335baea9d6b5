"""A packed base that exists once: the learner reads the tensors that the engine's own kernel computes with.

Marlin keeps a weight in tiles of 16 inputs by 64 outputs, eight codes to a word, in the order in which the threads of
its kernel want them. Nothing is lost in that order, so the learner can multiply it out like codes of its own: bit for
bit what it computed before.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lit_qrl.errors import ConfigError
from lit_qrl.formats.base import NumberFormat, QuantizedWeight
from lit_qrl.formats.numerics import E4M3_SMALLEST_NORMAL

TILE_IN, TILE_OUT = 16, 64
WORDS = TILE_IN * TILE_OUT // 8
"""Words of 32 bits that hold a tile of codes of 4 bits."""
SCALE_SHIFT = 7
"""Marlin keeps an E4M3 scale as the exponent, without its first bit, and mantissa bits of an fp16 number, times 2⁷."""


def marlin_codes(words: Tensor) -> Tensor:
    """Return the codes "out in/2", two to a byte and the first one low, of a weight in Marlin's order.

    A word holds the codes of inputs 2a, 2a + 8 (low half) and 2a + 1, 2a + 9 (high half) of outputs c and c + 8 of one
    16 × 16 sub-tile; four sub-tiles lie side by side in a tile, word by word.

    Args:
        words: "in/16 2·out", int32, of whole tiles; may be a slice of a fused layer's.

    >>> marlin_codes(torch.zeros(1, 128, dtype=torch.int32)).shape
    torch.Size([64, 8])
    """
    rows, columns = words.shape
    # in-tile, out-tile, c, a, sub-tile, then which of the word's four bytes: outputs + 8, inputs + 8
    tiles = words.reshape(rows, columns // WORDS, 8, 4, 4, 1, 1)
    shift = 4 * torch.arange(4, dtype=torch.int32, device=words.device).view(2, 2)
    pairs = ((tiles >> shift) & 0xF) | (((tiles >> (shift + 16)) & 0xF) << 4)
    return pairs.permute(1, 4, 5, 2, 0, 6, 3).reshape(columns // 2, 8 * rows).to(torch.uint8)


def marlin_scales(stored: Tensor) -> Tensor:
    """Return the block scales "out in/16", fp32, of an NVFP4 weight in Marlin's order, times the factor it chose.

    Args:
        stored: "in/16 out", uint8, of whole tiles.

    >>> marlin_scales(torch.full((1, 64), 88, dtype=torch.uint8))[0]  # 2^(88 >> 3) = 2^11 = 0.0625 · 2^15
    tensor([0.0005])
    """
    rows, columns = stored.shape
    halves = (stored.to(torch.int16) << 7).view(torch.float16).float() * 2.0**-SCALE_SHIFT
    # in an out-tile: i, then j's bits 2, 0 and 1, for output i + 8j
    tiles = halves.reshape(rows, columns // TILE_OUT, 8, 2, 2, 2)
    return tiles.permute(1, 3, 5, 4, 2, 0).reshape(columns, rows)


@dataclass(frozen=True)
class MarlinNVFP4:
    """The rows of one layer in an engine's NVFP4 weight, as Marlin's kernel reads it.

    Args:
        words: "in/16 2·out", int32, of the whole (fused) layer.
        stored: "in/16 out", uint8, its block scales.
        start: first output of the layer in the fused one.
        outputs: how many.
        factor: power of two by which the engine multiplied the block scales.
    """

    words: Tensor
    stored: Tensor
    start: int
    outputs: int
    factor: float = 1.0

    def _cut(self) -> tuple[Tensor, Tensor, int]:
        """Return words and scales of the tiles that hold the layer, and the row where it begins in them."""
        first, last = self.start // TILE_OUT, -(-(self.start + self.outputs) // TILE_OUT)
        words = self.words[:, first * WORDS : last * WORDS]
        return words, self.stored[:, first * TILE_OUT : last * TILE_OUT], self.start - first * TILE_OUT

    def quantized(self, format: NumberFormat, global_scale: Tensor) -> QuantizedWeight:
        """Return the weight in the layout of a checkpoint, made anew."""
        words, stored, skipped = self._cut()
        rows = slice(skipped, skipped + self.outputs)
        codes = marlin_codes(words)[rows].contiguous()
        scales = (marlin_scales(stored)[rows] / self.factor).to(torch.float8_e4m3fn).contiguous()
        return QuantizedWeight(codes, scales, global_scale, format, (self.outputs, 2 * codes.shape[1]))

    def dequantized(self, format: NumberFormat, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight "out in", made anew: the bits that `format.dequantize` gives for the checkpoint's codes."""
        words, stored, skipped = self._cut()
        multiply = _multiplier(format, words.device.type)
        return multiply(words, stored, skipped, self.outputs, 1.0 / self.factor, global_scale, dtype)

    def matched(self, own: QuantizedWeight) -> "MarlinNVFP4 | None":
        """Return this weight with its factor if it holds the codes and scales of `own`, else None.

        Marlin drops scales below the smallest normal E4M3 number to 0; such blocks may differ.
        """
        assert own.scales is not None
        assert own.global_scale is not None
        device = self.words.device
        scales = own.scales.to(device)
        _, stored, skipped = self._cut()
        rows = slice(skipped, skipped + self.outputs)
        largest, own_largest = float(marlin_scales(stored)[rows].amax()), float(scales.float().amax())
        factor = largest / own_largest if own_largest > 0 else 1.0
        if not 0 < factor < math.inf or math.frexp(factor)[0] != 0.5:
            return None
        found = replace(self, factor=factor)
        held = found.quantized(own.format, own.global_scale)
        if held.codes.shape != own.codes.shape or not torch.equal(held.codes, own.codes.to(device)):
            return None
        assert held.scales is not None
        kept, wanted = held.scales.float(), scales.float()
        dropped = (kept == 0) & (wanted * factor < E4M3_SMALLEST_NORMAL)
        return found if bool(((kept == wanted) | dropped).all()) else None


@lru_cache
def _multiplier(format: NumberFormat, device: str) -> Any:
    """Return a function that multiplies a stored weight out; on CUDA in one kernel, without codes in between."""

    def multiply(
        words: Tensor,
        stored: Tensor,
        skipped: int,
        outputs: int,
        inverse: float,
        global_scale: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        rows = slice(skipped, skipped + outputs)
        codes, scales = marlin_codes(words)[rows], marlin_scales(stored)[rows] * inverse
        q = QuantizedWeight(codes, scales, global_scale, format, (outputs, 2 * codes.shape[1]))
        return format.dequantize(q, dtype)

    return torch.compile(multiply, dynamic=False) if device == "cuda" else multiply


class WeightStore(Protocol):
    """What is asked of an engine whose weights a learner reads."""

    def stored_weight(self, layer: str) -> MarlinNVFP4 | None:
        """Return a linear layer's weight as it lies in the engine's memory, or None where its layout is not known."""

    def read_back(self, name: str) -> Tensor | None:
        """Return the loaded tensor of that checkpoint name, or None where the engine repacks its layout."""


@torch.no_grad()
def borrow(layers: Mapping[str, Any], plain: Mapping[str, nn.Parameter], engine: WeightStore) -> list[str]:
    """Let packed layers and frozen plain weights read the engine's tensors in place of their own; return which did.

    Everything is compared first: a layer goes on only if the engine holds what it held, so that nothing changes but
    the memory.

    Args:
        layers: packed layers by checkpoint name, with `weight`, `format` and `borrow`.
        plain: frozen parameters by checkpoint name, such as the embedding; one that the engine holds in another
            layout or dtype stays.
        engine: whose tensors are read.

    Raises:
        ConfigError: for a packed layer that the engine holds in a layout that is not known here.
    """
    for name, layer in layers.items():
        stored = engine.stored_weight(name)
        own = layer.weight
        found = None if stored is None else stored.matched(own)
        if found is None:
            why = "in a layout that is not known here" if stored is None else "with other codes or scales"
            raise ConfigError(
                f"The engine holds {name} {why}, so the learner cannot read it there.",
                expected="vLLM on CUDA with NVFP4 in Marlin's layout, sides of whole tiles",
                given=f"{tuple(own.shape)} in {type(engine).__name__}",
                remedy="Set share_weights to false.",
            )
        layer.borrow(found)
    taken = list(layers)
    for name, parameter in plain.items():
        live = engine.read_back(name)
        if live is None or live.dtype != parameter.dtype or live.device != parameter.device:
            continue
        if live.shape == parameter.shape and torch.equal(live, parameter):
            parameter.data = live.detach()
            taken.append(name)
    return taken
