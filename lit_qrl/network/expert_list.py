"""Experts of one layer that are held apart, each with linear layers of its own."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lit_qrl.network.experts import ExpertStack, experts_output, one_after_another


class ExpertList(nn.Module):
    """What stands in the place of stacked experts: `0.gate_proj`, `0.up_proj`, `0.down_proj`, `1.gate_proj`, …

    It computes as the family's own module does, with the same activation and biases, whose names and values it keeps.

    Args:
        stack: how they lay.
        plain: the family's own module, which gives its matrices up.
        linear: from a matrix's (out, in) to the layer that multiplies by it, without a bias.
    """

    is_swapped = True

    def __init__(self, stack: ExpertStack, plain: nn.Module, linear: Callable[[tuple[int, int]], nn.Module]) -> None:
        super().__init__()
        self.stack = stack
        self._plain = (plain,)  # no submodule: its matrices are gone, and its activation is wanted
        for name, parameter in plain._parameters.items():
            if name in stack.parts:
                assert parameter is not None
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                plain._parameters[name] = nn.Parameter(empty, requires_grad=False)
            else:
                self._parameters[name] = parameter
        leaves = [leaf for own in stack.parts.values() for leaf in own]
        for expert in range(stack.count):
            self.add_module(str(expert), nn.ModuleDict({leaf: linear(stack.shapes[leaf]) for leaf in leaves}))
        self.train(plain.training)

    @property
    def plain(self) -> Any:
        """The family's own module, with the biases that are held here."""
        (plain,) = self._plain
        for name, parameter in self._parameters.items():
            plain._parameters[name] = parameter
        return plain

    def joined(self, read: Callable[[Any], Tensor]) -> dict[str, Tensor]:
        """Return the stacked parameters by name.

        Args:
            read: from a matrix's layer to its weight "out in".
        """
        start = len(self.stack.name) + 1 if self.stack.name else 0
        return {
            matrix: self.stack.joined(
                matrix, {name: read(self.get_submodule(name[start:])) for name in self.stack.layers(matrix)}
            )
            for matrix in self.stack.parts
        }

    def forward(self, hidden_states: Tensor, chosen: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """Return what the experts make of their tokens; the arguments are those of `experts_output`."""

        def multiply(expert: int, matrix: str, rows: Tensor) -> list[Tensor]:
            held: Any = self._modules[str(expert)]
            return [held[leaf](rows) for leaf in self.stack.parts[matrix]]

        return experts_output(self.stack, self, one_after_another(multiply), hidden_states, chosen, weights)


def hold_apart(network: nn.Module, stacks: Mapping[str, ExpertStack]) -> None:
    """Put linear layers without memory in the place of stacked experts, one for each matrix, to be filled one by one.

    Args:
        network: changed in place.
        stacks: from `expert_stacks`.

    >>> from transformers import Qwen3MoeConfig
    >>> from lit_qrl.network.experts import expert_stacks
    >>> from lit_qrl.network.structure import outline
    >>> network = outline(Qwen3MoeConfig(num_hidden_layers=1, num_experts=4))
    >>> hold_apart(network, expert_stacks(network))
    >>> type(network.get_submodule("model.layers.0.mlp.experts.3.gate_proj")).__name__
    'Linear'
    """
    for name, stack in stacks.items():
        plain = network.get_submodule(name)
        dtype = next(plain.parameters()).dtype
        with torch.device("meta"):
            apart = ExpertList(
                stack, plain, lambda shape, dtype=dtype: nn.Linear(*shape[::-1], bias=False, dtype=dtype)
            )
        network.set_submodule(name, apart)
