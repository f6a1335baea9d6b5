"""Keys and values in slots of their own, which a step of fixed shapes reads and writes at lengths on the device."""

import torch
from torch import Tensor

from lit_qrl.formats.kernels import dispatch
from lit_qrl.network.autocast import autocast_input
from lit_qrl.rollout.embedded.cache import SlotCache
from lit_qrl.rollout.embedded.cache_scales import RoundedCache, Rounding
from lit_qrl.rollout.fixed_cache import FixedLayer


class StepLayer(FixedLayer):
    """Keys and values of one layer: "slots heads columns dim", allocated once and written in place.

    The cache holds the rows of the next step and their columns.
    """

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the layer; what is never written to must be finite, since a mask multiplies it by 0."""
        shape = (self.cache.capacity, key_states.shape[1], self.cache.columns)
        self.keys = key_states.new_zeros(*shape, key_states.shape[3])
        self.values = value_states.new_zeros(*shape, value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write a column of every row of the step and return all columns of those rows."""
        key_states, value_states = autocast_input(key_states), autocast_input(value_states)
        at = self.cache.at
        rows = len(at)
        keys, values = self.keys[:rows], self.values[:rows]
        if dispatch.available(key_states):
            from lit_qrl.rollout.embedded import attention_triton

            attention_triton.write(key_states[:, :, 0], value_states[:, :, 0], keys, values, at)
        else:
            row = torch.arange(rows, device=at.device)
            keys[row, :, at] = key_states[:, :, 0]
            values[row, :, at] = value_states[:, :, 0]
        return keys, values


class StepCache(RoundedCache):
    """Key-value cache of slots, in the form that Hugging Face models take, for one new token of each row.

    The caller sets `at` before a step: the column " b" that the new token of each of the first rows takes.

    Args:
        layers: number of layers.
        capacity: slots.
        columns: of each.
        rounding: of what is kept; None keeps it as it comes.
    """

    at: Tensor

    def __init__(self, layers: int, capacity: int, columns: int, rounding: Rounding | None = None) -> None:
        self.capacity, self.columns, self.rounding = capacity, columns, rounding
        super().__init__(layers=[StepLayer(self) for _ in range(layers)])

    @property
    def slots(self) -> list[StepLayer]:
        """The layers."""
        return self.layers  # pyright: ignore[reportReturnType]

    def place(self, prompts: SlotCache, owners: Tensor, slots: Tensor) -> None:
        """Copy prefilled prompts, which begin in column 0, into slots.

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

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy slots over others."""
        for layer in self.slots:
            for tensor in (layer.keys, layer.values):
                tensor.index_copy_(0, targets, tensor.index_select(0, sources))
