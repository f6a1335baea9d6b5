"""Experts that a model holds in one tensor: which slice is whose matrix, under which name, and how they multiply.

transformers stacks the experts of a layer into 3-D parameters, and checkpoints, engines and number formats know them
one by one. An `ExpertStack` says how the two belong together; a number format sees every slice as the weight "out in"
of a linear layer, named as checkpoints name it (`experts.3.gate_proj`), so that gate and up of one expert are a fused
group like those of a dense layer. The way of such a weight:

1. The learner holds the stack. `unstacked` cuts a stream of its tensors into slices, which are views, before
   `weight_stream` quantizes them; in a publish without a format the stack goes out as it is.
2. The embedded sampler, and a packed base, hold an `ExpertList`: a linear layer of codes for each slice. Precision
   plugins put layers over the learner's own stack (`precision/layers/low_bit.py`).
3. All of them compute by `experts_output`, as do transformers' own implementations (`ALL_EXPERTS_FUNCTIONS`): tokens
   sorted by expert, products of an expert's rows, the activation between them, and the sum over a token's experts.

Routers are no part of it: they keep the learner's precision.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from lit_qrl.errors import ConfigError, listed
from lit_qrl.network.autocast import autocast_input
from lit_qrl.network.names import base_of, checkpoint_modules
from lit_qrl.network.names import stored as stored_as
from lit_qrl.network.structure import EXPERT_LAYOUTS, text_part
from lit_qrl.receipts.checksum import slices

_GATED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_UNGATED = {"up_proj": ("up_proj",), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class ExpertStack:
    """How the experts of one layer lie in its 3-D parameters.

    Args:
        name: of the module that holds them.
        count: experts.
        parts: by the name of a parameter, what its slices are called in a checkpoint: gate and up of one, or a single.
        shapes: (out, in) of the matrices of one expert, by those names.
        transposed: the parameters are "experts in out" rather than "experts out in".
        interleaved: rows of gate and up alternate, rather than follow one another.
        apart: the family's checkpoints hold each matrix as a tensor of its own, and so engines can take them.
    """

    name: str
    count: int
    parts: Mapping[str, tuple[str, ...]]
    shapes: Mapping[str, tuple[int, int]]
    transposed: bool = False
    interleaved: bool = False
    apart: bool = False

    def layers(self, matrix: str | None = None) -> dict[str, tuple[int, int]]:
        """Return (out, in) of every expert's matrices by name, in the order of a stream.

        Args:
            matrix: the parameter that they lie in; None for all.

        >>> shapes = {"up_proj": (4, 2), "down_proj": (2, 4)}
        >>> stack = ExpertStack("experts", 1, _UNGATED, shapes)
        >>> stack.layers()
        {'experts.0.up_proj': (4, 2), 'experts.0.down_proj': (2, 4)}
        """
        return {
            f"{self.name}.{expert}.{leaf}": self.shapes[leaf]
            for one, leaves in self.parts.items()
            if matrix in (None, one)
            for expert in range(self.count)
            for leaf in leaves
        }

    def within(self, layers: Collection[str]) -> bool:
        """Return whether `layers` names the experts' matrices, which it does for all of them or for none."""
        return next(iter(self.layers())) in layers

    def parts_of(self, matrix: str, one: Tensor) -> tuple[Tensor, ...]:
        """Return the matrices "out in" that lie in one expert's part of a parameter, or "experts out in" of all.

        They are views, through which gradients flow.
        """
        rows = one.mT if self.transposed else one
        if len(self.parts[matrix]) == 1:
            return (rows,)
        return rows.unflatten(-2, (-1, 2)).unbind(-2) if self.interleaved else rows.chunk(2, dim=-2)

    def named(self, matrix: str, stack: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the names of `layers` and their weights, views of a parameter's values and `slices` of it."""
        beside = (slices(part) for part in self.parts_of(matrix, stack))
        return zip(self.layers(matrix), (part for parts in zip(*beside, strict=True) for part in parts), strict=True)

    def joined(self, matrix: str, weights: Mapping[str, Tensor]) -> Tensor:
        """Return what `named` takes apart.

        Args:
            matrix: the parameter's name.
            weights: by the names of `layers`, "out in".
        """
        names = [[f"{self.name}.{expert}.{leaf}" for expert in range(self.count)] for leaf in self.parts[matrix]]
        whole = self.outputs([torch.stack([weights[name] for name in own]).mT for own in names])
        return (whole if self.transposed else whole.mT).contiguous()

    def outputs(self, parts: list[Tensor]) -> Tensor:
        """Return the products "rows out" with an expert's matrices of one parameter as the model's own code has it."""
        if len(parts) == 1:
            return parts[0]
        return torch.stack(parts, dim=-1).flatten(-2) if self.interleaved else torch.cat(parts, dim=-1)


def expert_weights(root: nn.Module) -> dict[str, nn.Parameter]:
    """Return the matrices of experts that lie in one tensor "experts · ·", by their names in the checkpoint.

    >>> moe = nn.Module()
    >>> moe.up_proj = nn.Parameter(torch.zeros(4, 2, 2))
    >>> list(expert_weights(nn.ModuleDict({"experts": moe, "mixer": nn.Conv1d(2, 2, 2)})))
    ['experts.up_proj']
    """
    return {f"{name}.{key}" if name else key: one for name, _, held in _holders(root) for key, one in held.items()}


def _holders(root: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, nn.Parameter]]]:
    """Yield the modules of experts: their names, themselves, and their 3-D parameters; there are none held apart."""
    text = set(text_part(root).modules())
    for name, module in checkpoint_modules(root):
        base = base_of(module)
        held = {key: one for key, one in base._parameters.items() if one is not None and one.ndim == 3}
        if hasattr(base, "stack") or (held and base in text and not isinstance(base, _ConvNd)):
            yield name, base, held


def expert_stacks(root: nn.Module, exclude: Collection[str] = ()) -> dict[str, ExpertStack]:
    """Return how the experts of every layer lie, or lay before they were held apart, by the names of their modules.

    Experts that lie in a way that is not known are left out; `unknown_experts` names them.

    Args:
        root: the model; its weights need not be there.
        exclude: globs over names of modules, of their parameters (`*.experts.gate_up_proj`) and of single matrices
            (`*.experts.3.gate_proj`); a layer's experts are left out together.

    Raises:
        ConfigError: for globs that name some of a layer's matrices and not all.
    """
    leaves: dict[str, tuple[str, ...] | None] = {}
    found: dict[str, ExpertStack] = {}
    for name, module, held in _holders(root):
        own = getattr(module, "stack", None)
        stack = own if isinstance(own, ExpertStack) else _stack(root, name, module, held, leaves)
        if stack is not None and not _excluded(stack, exclude):
            found[name] = stack
    return found


def unknown_experts(root: nn.Module, exclude: Collection[str] = ()) -> dict[str, nn.Parameter]:
    """Return the matrices of experts that lie in a way that is not known, by name, but for what `exclude` names."""
    known = expert_stacks(root)
    return {
        name: one
        for name, one in expert_weights(root).items()
        if (holder := name.rpartition(".")[0]) not in known
        and not any(fnmatchcase(name, glob) or fnmatchcase(holder, glob) for glob in exclude)
    }


def _stack(
    root: nn.Module, name: str, module: nn.Module, held: Mapping[str, Tensor], known: dict[str, tuple[str, ...] | None]
) -> ExpertStack | None:
    says = {**EXPERT_LAYOUTS.get(type(module).__name__, {}), **vars(module)}
    parts = next((parts for parts in (_GATED, _UNGATED) if set(parts) == set(held)), None)
    if parts is None or "is_transposed" not in says:
        return None
    transposed, interleaved = bool(says["is_transposed"]), not says.get("is_concatenated", True)
    stored = {key: _leaves(root, f"{name}.{key}", held[key], own, known) for key, own in parts.items()}
    parts = {key: stored[key] or own for key, own in parts.items()}
    shapes = {}
    for key, own in parts.items():
        _, rows, columns = held[key].shape
        rows, columns = (columns, rows) if transposed else (rows, columns)
        shapes |= dict.fromkeys(own, (rows // len(own), columns))
    (first, last), counts = (shapes[own[0]] for own in parts.values()), {one.shape[0] for one in held.values()}
    if first != (last[1], last[0]) or len(counts) > 1:
        return None
    return ExpertStack(name, counts.pop(), parts, shapes, transposed, interleaved, all(stored.values()))


def _leaves(
    root: nn.Module, name: str, stack: Tensor, own: tuple[str, ...], known: dict[str, tuple[str, ...] | None]
) -> tuple[str, ...] | None:
    """Return what a checkpoint calls the matrices of one expert, such as w1 and w3; None where it stacks them too."""
    key = name.rpartition(".")[2]
    if key not in known:
        stored = stored_as(root, name, stack.detach()) if isinstance(root, PreTrainedModel) else {}
        ends = list(dict.fromkeys(one.removesuffix(".weight").rpartition(".")[2] for one in stored))
        known[key] = tuple(ends) if len(stored) == len(own) * stack.shape[0] and len(ends) == len(own) else None
    return known[key]


def stored_names(root: Any, names: Iterable[str]) -> dict[str, str]:
    """Return by the names of a model's tensors those under which a checkpoint holds them, as transformers reads it.

    Experts that a checkpoint holds one by one have the names of `ExpertStack.layers`.

    Args:
        root: a Hugging Face model; its weights need not be there.
        names: of the checkpoint's tensors: weights, or codes and scales.

    >>> from lit_qrl.network.structure import outline
    >>> from transformers import GPTNeoXConfig
    >>> stored_names(outline(GPTNeoXConfig(num_hidden_layers=1)), ["embed_out.weight"])
    {'lm_head.weight': 'embed_out.weight'}
    """
    apart: dict[str, str] = {}
    for stack in expert_stacks(root).values():
        for matrix, leaves in stack.parts.items() if stack.apart else ():
            rows, columns = stack.shapes[leaves[0]]
            sizes = (columns, len(leaves) * rows) if stack.transposed else (len(leaves) * rows, columns)
            whole = torch.empty((stack.count, *sizes), device="meta")
            for layer in (name.removesuffix(".weight") for name in stored_as(root, f"{stack.name}.{matrix}", whole)):
                expert, leaf = layer.split(".")[-2:]
                apart[layer] = f"{stack.name}.{expert}.{leaf}"
    conversions = get_model_conversion_mapping(root)
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    others: list[Any] = [one for one in conversions if not isinstance(one, WeightRenaming)]
    found: dict[str, str] = {}
    for name in names:
        layer, mark, rest = name.partition(".weight")
        renamed, computed = rename_source_key(name, renamings, others)
        found[f"{apart[layer]}{mark}{rest}" if layer in apart else name if computed else renamed] = name
    return found


def _excluded(stack: ExpertStack, exclude: Collection[str]) -> bool:
    matched = {
        name: any(fnmatchcase(one, glob) for glob in exclude for one in (name, stack.name, f"{stack.name}.{matrix}"))
        for matrix in stack.parts
        for name in stack.layers(matrix)
    }
    named, left = ([name for name, match in matched.items() if match == which] for which in (True, False))
    if named and left:
        raise ConfigError(
            f"The globs that leave layers out split the experts of {stack.name}, which engines hold in one format.",
            expected="all matrices of a layer's experts, or none",
            given=f"{listed(named, 2)} without {left[0]}",
            remedy="Add '*.experts' to them, or take these out.",
        )
    return bool(named)


def unstacked(named: Iterable[tuple[str, Tensor]], stacks: Mapping[str, ExpertStack]) -> Iterator[tuple[str, Tensor]]:
    """Yield a stream of a model's tensors with the experts of `stacks` one by one, as views.

    Args:
        named: checkpoint names and tensors.
        stacks: from `expert_stacks`.
    """
    for name, tensor in named:
        holder, _, matrix = name.rpartition(".")
        stack = stacks.get(holder)
        if stack is None or matrix not in stack.parts:
            yield name, tensor
        else:
            yield from ((f"{layer}.weight", part) for layer, part in stack.named(matrix, tensor.detach()))


def activation(module: Any) -> Callable[[Tensor], Tensor]:
    """Return what lies between the two products of a family's experts: from "rows gate+up" to "rows inner".

    Args:
        module: the family's own, or a layer of ours in its place, which keeps it as `_plain`.
    """
    (family,) = getattr(module, "_plain", (module,))
    if not getattr(family, "has_gate", True):
        return family.act_fn

    def gated(rows: Tensor) -> Tensor:
        gate, up = rows.chunk(2, dim=-1)
        return family.act_fn(gate) * up

    return getattr(family, "_apply_gate", gated)


def experts_output(
    stack: ExpertStack,
    module: Any,
    multiply: Callable[[str, Tensor, Tensor], list[Tensor]],
    hidden: Tensor,
    chosen: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Return the sum over each token's experts of what they make of it: "tokens hidden".

    Args:
        stack: how they lie.
        module: as `activation` takes it, with its biases.
        multiply: from the name of a parameter, rows sorted by expert, and where the rows of each end (" experts",
            int32), to the products with each of the matrices there; `one_after_another` makes it of products of an
            expert.
        hidden: "tokens hidden"; without `chosen` the rows of all experts, each as many, one expert after another.
        chosen: the experts of each token, "tokens k".
        weights: of these experts, "tokens k"; None without `chosen`.
    """
    if not len(hidden):
        return torch.zeros_like(hidden)
    if chosen is None:
        chosen = torch.arange(len(hidden), device=hidden.device)[:, None] // (len(hidden) // stack.count)
    between, (first, last) = activation(module), stack.parts
    experts = chosen.flatten()
    order = experts.argsort(stable=True)
    ends = experts.bincount(minlength=stack.count).cumsum(0).to(torch.int32)

    def product(matrix: str, rows: Tensor) -> Tensor:
        out, bias = stack.outputs(multiply(matrix, rows, ends)), getattr(module, f"{matrix}_bias", None)
        return out if bias is None else out + bias[experts[order]].to(out.dtype)

    made = product(last, between(product(first, autocast_input(hidden)[order // chosen.shape[-1]])))
    # back in the order of the tokens, so that each sum runs over its own experts, whatever else is in the batch
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    made = made[back].view(*chosen.shape, -1)
    return (made if weights is None else made * weights.unsqueeze(-1)).sum(dim=1).to(hidden.dtype)


def one_after_another(
    multiply: Callable[[int, str, Tensor], list[Tensor]],
) -> Callable[[str, Tensor, Tensor], list[Tensor]]:
    """Return what `experts_output` takes.

    Args:
        multiply: from an expert, the name of a parameter, and rows, to their products with the expert's matrices there.
    """
    lengths: list[int] = []

    def of_all(matrix: str, rows: Tensor, ends: Tensor) -> list[Tensor]:
        if not lengths:  # for which the host waits once
            lengths.extend(ends.diff(prepend=ends.new_zeros(1)).tolist())
        parts = rows.split(lengths)
        made = [multiply(expert, matrix, part) for expert, part in enumerate(parts) if len(part)]
        return [torch.cat(products) for products in zip(*made, strict=True)]

    return of_all


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
