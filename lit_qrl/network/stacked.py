"""Quantizing the matrices of a stack some at a time, though they come and go one by one."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lit_qrl.errors import within_memory
from lit_qrl.formats.base import NumberFormat, QuantizedWeight
from lit_qrl.formats.numerics import magnitudes, postponed_checks
from lit_qrl.receipts.checksum import slice_of, slices

AT_ONCE = 1 << 27
"""Numbers of one operand that a launch takes: enough to be as fast as memory, and half a gigabyte of fp32 at most."""
REMEDY = (
    "A quantizer needs several copies of one layer: lower the engine's share of the device, or quantize where there is "
    "more memory."
)


class Made(NamedTuple):
    """A matrix in its format, and the magnitudes by which an accelerator will know later whether it was finite."""

    weight: QuantizedWeight
    amaxes: list[Tensor]


class StackQuantizer:
    """Quantizes matrices that are slices of stacks (`checksum.slices`); what one launch made is kept until it is taken.

    Args:
        format: of the codes.
        cast: dtype that the weights are cast to first.
    """

    def __init__(self, format: NumberFormat, cast: torch.dtype | None = None) -> None:
        self.format, self.cast = format, cast
        self._stacks: tuple[Tensor, ...] = ()
        self._range = range(0)
        self._made: list[list[Made]] | None = None

    def of(self, parts: Mapping[str, Tensor]) -> list[Made] | None:
        """Return the matrices of one fused group in the format, or None where they must be quantized one by one.

        So must those that are no slices of stacks side by side, and on a CPU those of which one is not finite, so that
        the error has its name.

        Args:
            parts: names and weights.
        """
        found = [slice_of(tensor) for tensor in parts.values()]
        places = [one for one in found if one is not None]
        if len(places) < len(found) or len({(one.index, one.stack.shape[0]) for one in places}) > 1:
            return None
        stacks, index = tuple(one.stack for one in places), places[0].index
        same = len(stacks) == len(self._stacks) and all(a is b for a, b in zip(stacks, self._stacks, strict=True))
        if not same or index not in self._range:
            self._quantize(stacks, index, next(iter(parts)))
        made = None if self._made is None else [part[index - self._range.start] for part in self._made]
        if index == stacks[0].shape[0] - 1:
            self._stacks, self._range, self._made = (), range(0), None
        return made

    @torch.no_grad()
    def _quantize(self, stacks: tuple[Tensor, ...], index: int, name: str) -> None:
        count = max(AT_ONCE // max(stacks[0][0].numel(), 1), 1)
        first = index - index % count
        self._stacks, self._range = stacks, range(first, min(first + count, len(stacks[0])))
        what = f"quantizing {len(self._range)} matrices from {name} on to {self.format.name}"
        try:
            with within_memory(what, REMEDY):
                weights = [stack[first : self._range.stop].to(dtype=self.cast) for stack in stacks]
                self._made = [self._cut(one, self._shared(weights)) for one in weights]
        except ValueError:
            self._made = None

    def _shared(self, weights: list[Tensor]) -> Tensor | None:
        if not self.format.shares_amax or len(weights) < 2:
            return None
        return torch.stack([magnitudes(one) for one in weights]).amax(dim=0)

    def _cut(self, weights: Tensor, shared: Tensor | None) -> list[Made]:
        kept: list[Tensor] = []
        with postponed_checks(kept):
            q = self.format.quantize_stack(weights, shared)
        nothing = [None] * len(weights)
        scales = nothing if q.scales is None else slices(q.scales)
        wholes = nothing if q.global_scale is None else slices(q.global_scale)
        parts = zip(slices(q.codes), scales, wholes, _apart(kept, len(weights)), strict=True)
        return [
            Made(QuantizedWeight(codes, scale, whole, q.format, q.shape), amaxes)
            for codes, scale, whole, amaxes in parts
        ]


def _apart(kept: list[Tensor], count: int) -> list[list[Tensor]]:
    """Return for each matrix what was kept of it, of all at once or of one after another."""
    if len(kept) == 1:
        return [[amax] for amax in kept[0].reshape(count, -1).amax(dim=1)]
    each = len(kept) // count
    return [[amax.amax() for amax in kept[each * number : each * (number + 1)]] for number in range(count)]
