"""A static key-value cache whose rows can be shared out, dropped, kept and reused."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from lit_qrl.network.autocast import autocast_input
from lit_qrl.network.structure import cached_numbers
from lit_qrl.rollout.embedded.cache_scales import RoundedCache, Rounding


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer: "rows heads length dim", allocated once and written in place.

    They are in the dtype that attention multiplies in: under autocast its own.

    Args:
        cache: the cache that this layer belongs to; it holds the number of live rows and of filled columns.
    """

    is_sliding = False
    keys: Any
    values: Any

    def __init__(self, cache: "SlotCache") -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the layer for the whole batch and length."""
        shape = (self.cache.capacity, key_states.shape[1], self.cache.max_length)
        self.keys = key_states.new_empty(*shape, key_states.shape[3])
        self.values = value_states.new_empty(*shape, value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the new columns and return all filled columns of the live rows."""
        key_states, value_states = autocast_input(key_states), autocast_input(value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows, start = self.cache.rows, self.cache.filled
        stop = start + key_states.shape[2]
        self.keys[:rows, :, start:stop] = key_states
        self.values[:rows, :, start:stop] = value_states
        return self.keys[:rows, :, :stop], self.values[:rows, :, :stop]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the keys that the next forward sees."""
        return self.cache.filled + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of filled columns."""
        return self.cache.filled

    def get_max_length(self) -> int:
        """Return the number of allocated columns."""
        return self.cache.max_length


class SlotCache(RoundedCache):
    """Key-value cache of one decode batch, in the form that Hugging Face models take.

    The caller sets `filled` after each forward and `rows` when sequences end.

    Args:
        layers: number of layers.
        capacity: rows allocated.
        max_length: columns allocated: prompt plus completion limit.
        rounding: of what is kept; None keeps it as it comes.
    """

    def __init__(self, layers: int, capacity: int, max_length: int, rounding: Rounding | None = None) -> None:
        self.capacity, self.max_length, self.rounding = capacity, max_length, rounding
        self.rows, self.filled = capacity, 0
        super().__init__(layers=[SlotLayer(self) for _ in range(layers)])

    @property
    def slots(self) -> list[SlotLayer]:
        """The layers."""
        return self.layers  # pyright: ignore[reportReturnType]

    def take(self, prompts: "SlotCache", counts: Tensor, start: int) -> None:
        """Copy prefilled prompts into the rows from `start` on, each as often as it has completions.

        Args:
            prompts: cache of the prompts, one row each, as wide as this cache's filled part.
            counts: completions of each prompt.
            start: first row to write.
        """
        stop, width = start + int(counts.sum()), prompts.filled
        same = bool((counts == counts[0]).all())
        for source, target in zip(prompts.slots, self.slots, strict=True):
            if not target.is_initialized:
                target.lazy_initialization(source.keys, source.values)
            for old, new in ((source.keys, target.keys), (source.values, target.values)):
                if same:
                    rows = new[start:stop, :, :width].unflatten(0, (len(counts), -1))
                    rows.copy_(old[: len(counts), None, :, :width].expand_as(rows))
                else:
                    new[start:stop, :, :width] = old[:, :, :width].repeat_interleave(counts, dim=0)

    def move(self, sources: Tensor, targets: Tensor, swap: bool = False) -> None:
        """Copy the filled part of some rows over others, or exchange the two."""
        for layer in self.slots:
            for tensor in (layer.keys, layer.values):
                filled = tensor[:, :, : self.filled]
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
            begin = rows[chosen[0]].start
            # Where the conversations are of one length, whole columns are copied.
            alike = all(counts[target] == ends and rows[target].start == begin for target in chosen)
            first = torch.tensor([[ends - counts[target]] for target in chosen], device=device)
            start = torch.tensor([[rows[target].start] for target in chosen], device=device)
            columns = torch.arange(ends, device=device)
            empty = (columns < first)[:, None, :, None]
            columns = (columns - first + start).clamp_(min=0)
            for old, new in zip(held.slots, self.slots, strict=True):
                if not new.is_initialized:
                    new.lazy_initialization(old.keys, old.values)
                    new.keys[:, :, :ends], new.values[:, :, :ends] = 0, 0
                for source, target in ((old.keys, new.keys), (old.values, new.values)):
                    if alike:
                        taken = source[:, :, begin : begin + ends].index_select(0, sources)
                    else:
                        taken = source[sources[:, None], :, columns].transpose(1, 2).masked_fill(empty, 0)
                    target[:, :, :ends].index_copy_(0, targets, taken)

    @staticmethod
    def bytes_per_token(config: Any, dtype: torch.dtype) -> int:
        """Return the bytes that one token of one sequence takes in all layers."""
        return cached_numbers(config) * dtype.itemsize


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
