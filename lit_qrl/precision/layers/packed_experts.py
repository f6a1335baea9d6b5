"""The packed experts of a layer under an adapter: codes one by one, and on a GPU one product of all."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lit_qrl.network.expert_list import ExpertList
from lit_qrl.network.grouped import can_group, grouped_output, grouped_product
from lit_qrl.precision.layers.low_bit import autocast_input


class PackedExperts(ExpertList):
    """Experts of `PackedLinear` layers; where the device has a grouped GEMM, each matrix is multiplied out for it."""

    def forward(self, hidden_states: Tensor, chosen: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """Return what the experts make of their tokens; the arguments are those of `routed`."""
        x = autocast_input(hidden_states)
        if chosen is None or weights is None or not len(x) or not can_group(self.stack, x):
            return super().forward(hidden_states, chosen, weights)

        def multiply(matrix: str, rows: Tensor, ends: Tensor) -> list[Tensor]:
            made = (partial(self._dequantized, leaf, rows) for leaf in self.stack.parts[matrix])
            return [grouped_product(rows, ends, operand) for operand in made]

        return grouped_output(self.stack, self, multiply, x, chosen, weights).to(hidden_states.dtype)

    @torch.no_grad()
    def _dequantized(self, leaf: str, like: Tensor) -> Tensor:
        """Return one matrix of all experts, "experts out in", multiplied out in the dtype of the rows."""
        held: list[Any] = [self.get_submodule(f"{expert}.{leaf}") for expert in range(self.stack.count)]
        return torch.stack([layer.dequantized(like.dtype, like.device) for layer in held])
