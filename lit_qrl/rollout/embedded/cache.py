"""A static key-value cache whose rows can be shared out, dropped, kept and reused; and one in the numbers of FP8.

The scales of an FP8 cache are taken anew of what new weights make of the next prompts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from lit_qrl.formats.kernels import dispatch
from lit_qrl.formats.numerics import E4M3_MAX, round_e4m3
from lit_qrl.network.autocast import autocast_input
from lit_qrl.network.structure import body, cached

CacheDtype = Literal["auto", "fp8"]
MARGIN = 2.0
"""FP8 is as exact at half its range."""
SEQUENCES = 8
"""Prompts that are looked at."""


def rounded(numbers: Tensor, scale: Tensor) -> Tensor:
    """Return what a cache of E4M3 numbers gives back of keys or values, in their dtype.

    >>> rounded(torch.tensor([17.0]), torch.tensor(1.0)), rounded(torch.tensor([0.3]), torch.tensor(0.5))
    (tensor([16.]), tensor([0.3125]))
    """
    codes = round_e4m3((numbers.float() / scale).clamp_(-E4M3_MAX, E4M3_MAX))
    return (codes * scale).to(numbers.dtype)


class RoundedCache(Cache):
    """A cache that keeps what E4M3 leaves of keys and values, or all of them where there are no scales."""

    scales: Tensor | None = None
    """"layers 2", fp32: of a layer's keys, and of its values."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep new keys and values, and return all that the layer holds."""
        if self.scales is not None:
            keys, values = self.scales[layer_idx]
            key_states, value_states = rounded(key_states, keys), rounded(value_states, values)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class ScoringCache(RoundedCache, DynamicCache):
    """The cache of one forward pass over whole sequences."""

    def __init__(self, scales: Tensor | None) -> None:
        super().__init__()
        self.scales = scales


@torch.no_grad()
def scales_of(network: Any, sequences: Sequence[Sequence[int]], margin: float = MARGIN) -> Tensor:
    """Return the scales "layers 2" at which E4M3 holds the largest key and value of each layer.

    Args:
        network: the sampler's Hugging Face model.
        sequences: of which the first ones are looked at.
        margin: how much larger than these a key or value may be.
    """
    sequences = sequences[:SEQUENCES]
    lengths = torch.tensor([len(one) for one in sequences])
    tokens = torch.tensor([[*one, *[0] * (int(lengths.max()) - len(one))] for one in sequences])
    device = network.get_input_embeddings().weight.device
    cache = DynamicCache()
    body(network)(input_ids=tokens.to(device), **cached(network, cache))
    # what stands behind a sequence's end is seen by nothing before it, and does not count
    filler = (torch.arange(tokens.shape[1]) >= lengths[:, None])[:, None, :, None].to(device)
    kept: list[tuple[Tensor, Tensor]] = [(layer.keys, layer.values) for layer in cache.layers]  # pyright: ignore
    found = [torch.stack([part.float().masked_fill(filler, 0).abs().amax() for part in pair]) for pair in kept]
    largest = torch.stack(found)
    return torch.where(largest > 0, largest, 1.0) * (margin / E4M3_MAX)


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer: "rows heads columns dim", allocated once and written in place.

    They are in the dtype that attention multiplies in: under autocast its own.

    Args:
        cache: the cache that this layer belongs to; it says what the next forward writes.
    """

    is_sliding = False
    keys: Any
    values: Any

    def __init__(self, cache: "SlotCache") -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the layer; what is never written to must be finite, since a mask multiplies it by 0."""
        shape = (self.cache.capacity, key_states.shape[1], self.cache.columns)
        self.keys = key_states.new_zeros(*shape, key_states.shape[3])
        self.values = value_states.new_zeros(*shape, value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the new columns and return all filled ones, or all there are, of the rows that are computed."""
        key_states, value_states = autocast_input(key_states), autocast_input(value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        at, rows = self.cache.at, self.cache.rows
        keys, values = self.keys[:rows], self.values[:rows]
        if at is None:
            start, stop = self.cache.filled, self.cache.filled + key_states.shape[2]
            keys[:, :, start:stop] = key_states
            values[:, :, start:stop] = value_states
            return keys[:, :, :stop], values[:, :, :stop]
        if dispatch.available(key_states, "decoding"):
            from lit_qrl.rollout.embedded import attention_triton

            attention_triton.write(key_states[:, :, 0], value_states[:, :, 0], keys, values, at)
        else:
            row = torch.arange(rows, device=at.device)
            keys[row, :, at] = key_states[:, :, 0]
            values[row, :, at] = value_states[:, :, 0]
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the keys that the next forward sees."""
        return (self.cache.filled + query_length if self.cache.at is None else self.cache.columns), 0

    def get_seq_length(self) -> int:
        """Return the number of filled columns; 0 where each row has its own and positions are given."""
        return self.cache.filled if self.cache.at is None else 0

    def get_max_length(self) -> int:
        """Return the number of allocated columns."""
        return self.cache.columns


class SlotCache(RoundedCache):
    """Key-value cache of slots, in the form that Hugging Face models take; the caller says before each forward where.

    Either all rows have the first `filled` columns and get the next ones, or each gets the column `at` " b", which lies
    on the device; a forward is of the first `rows`.

    Args:
        layers: number of layers.
        capacity: rows allocated.
        columns: allocated for each.
        scales: of what is kept in E4M3; None keeps it as it comes.
    """

    kind = SlotLayer

    def __init__(self, layers: int, capacity: int, columns: int, scales: Tensor | None = None) -> None:
        self.capacity, self.columns, self.scales = capacity, columns, scales
        self.rows, self.filled = capacity, 0
        self.at: Tensor | None = None
        super().__init__(layers=[self.kind(self) for _ in range(layers)])

    @property
    def slots(self) -> list[SlotLayer]:
        """The layers."""
        return self.layers  # pyright: ignore[reportReturnType]

    def place(self, prompts: "SlotCache", owners: Tensor, slots: Tensor) -> None:
        """Copy prefilled prompts into the first columns of slots.

        Args:
            prompts: their cache, one row each.
            owners: " m", the prompt of each slot.
            slots: " m", which to fill.
        """
        width = prompts.filled
        for source, target in zip(prompts.slots, self.slots, strict=True):
            if not target.is_initialized:
                target.lazy_initialization(source.keys, source.values)
            for old, new in ((source.keys, target.keys), (source.values, target.values)):
                new[:, :, :width].index_copy_(0, slots, old[:, :, :width].index_select(0, owners))

    def move(self, sources: Tensor, targets: Tensor, swap: bool = False) -> None:
        """Copy what is filled of some rows over others, or exchange the two."""
        for layer in self.slots:
            for tensor in (layer.keys, layer.values):
                filled = tensor[:, :, : self.filled] if self.at is None else tensor
                moved = filled.index_select(0, sources)
                if swap:
                    filled.index_copy_(0, sources, filled.index_select(0, targets))
                filled.index_copy_(0, targets, moved)

    def restore(self, rows: "Mapping[int, HeldRow]", counts: Sequence[int], ends: int) -> None:
        """Fill the columns before `ends` with what rows of other caches hold of the sequences' beginnings, 0 elsewhere.

        Args:
            rows: what is held of this cache's rows, by their number.
            counts: tokens to take over, one number for every row of this cache; the last of them comes to stand in
                column `ends` − 1.
            ends: number of columns to fill.
        """
        for held in {id(row.cache): row.cache for row in rows.values()}.values():
            chosen = [target for target, row in rows.items() if row.cache is held]
            device = held.slots[0].keys.device
            targets = torch.tensor(chosen, device=device)
            sources = torch.tensor([rows[target].row for target in chosen], device=device)
            first = torch.tensor([[ends - counts[target]] for target in chosen], device=device)
            start = torch.tensor([[rows[target].start] for target in chosen], device=device)
            columns = torch.arange(ends, device=device)
            empty = (columns < first)[:, None, :, None]
            columns = (columns - first + start).clamp_(min=0)
            for old, new in zip(held.slots, self.slots, strict=True):
                if not new.is_initialized:
                    new.lazy_initialization(old.keys, old.values)
                for source, target in ((old.keys, new.keys), (old.values, new.values)):
                    taken = source[sources[:, None], :, columns].transpose(1, 2).masked_fill_(empty, 0)
                    target[:, :, :ends].index_copy_(0, targets, taken)


@dataclass(slots=True)
class HeldRow:
    """Keys and values of the beginning of a sequence, in a row of a cache.

    Args:
        cache: that holds them.
        row: of it.
        start: column of the first token.
        tokens: ids of those tokens.
    """

    cache: SlotCache
    row: int
    start: int
    tokens: Sequence[int]

    def shared(self, sequence: Sequence[int]) -> int:
        """Return how many tokens at the beginning of another sequence are held, its last one left out."""
        most = min(len(self.tokens), len(sequence) - 1)
        if list(self.tokens[:most]) == list(sequence[:most]):
            return most
        return next(index for index in range(most) if self.tokens[index] != sequence[index])
