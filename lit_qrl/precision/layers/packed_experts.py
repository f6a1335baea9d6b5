"""The packed experts of a layer under an adapter: codes one by one, and on a GPU one product of all."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lit_qrl.formats.base import QuantizedWeight
from lit_qrl.network.autocast import autocast_input
from lit_qrl.network.experts import ExpertList, experts_output
from lit_qrl.network.grouped import can_group, grouped_product
from lit_qrl.precision.layers.packed_linear import PackedLinear
from lit_qrl.receipts.checksum import slice_of


class PackedExperts(ExpertList):
    """Experts of `PackedLinear` layers; where the device has a grouped GEMM, each matrix is multiplied out for it."""

    def forward(self, hidden_states: Tensor, chosen: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """Return what the experts make of their tokens; the arguments are those of `experts_output`."""
        first: Any = next(iter(self._modules["0"].values()))  # pyright: ignore
        grouped = first.kernel != "format" and can_group(self.stack, autocast_input(hidden_states))
        if chosen is None or not grouped:  # a format's own GEMM takes one weight
            return super().forward(hidden_states, chosen, weights)

        def multiply(matrix: str, rows: Tensor, ends: Tensor) -> list[Tensor]:
            rows = autocast_input(rows)
            made = (partial(self._dequantized, leaf, rows) for leaf in self.stack.parts[matrix])
            return [grouped_product(rows, ends, operand) for operand in made]

        return experts_output(self.stack, self, multiply, hidden_states, chosen, weights)

    @torch.no_grad()
    def _dequantized(self, leaf: str, like: Tensor) -> Tensor:
        """Return one matrix of all experts, "experts out in", multiplied out in the dtype of the rows."""
        held: list[Any] = [self._modules[str(expert)][leaf] for expert in range(self.stack.count)]  # pyright: ignore
        made: list[Tensor] = []
        while held:
            together = _stacked(held)
            count = 1 if together is None else len(together.codes)
            if together is None or together.codes.device != like.device:
                made += [layer.dequantized(like.dtype, like.device).unsqueeze(0) for layer in held[:count]]
            else:
                made.append(together.format.dequantize_stack(together, like.dtype))
            held = held[count:]
        return made[0] if len(made) == 1 else torch.cat(made)


def _stacked(layers: Sequence[PackedLinear]) -> QuantizedWeight | None:
    """Return the codes of the first layers as one stack, where they are its slices one after another, else None."""
    first = layers[0]
    start = slice_of(first.codes) if first.codes is not None else None
    if start is None or start.index or first.parts:
        return None
    count, stacks = len(start.stack), {}
    for name in ("codes", "scales", "global_scale"):
        tensors = [getattr(layer, name) for layer in layers[:count]]
        found = [None if one is None else slice_of(one) for one in tensors]
        if all(one is None for one in tensors):
            stacks[name] = None
        elif [one and one.index for one in found] == list(range(count)) and len(
            {id(one and one.stack) for one in found}
        ) == 1:
            stacks[name] = found[0].stack  # pyright: ignore[reportOptionalMemberAccess]
        else:
            return None
    return QuantizedWeight(**stacks, format=first.format, shape=first.shape)
