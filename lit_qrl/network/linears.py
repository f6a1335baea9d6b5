"""Which linear layers are quantized, which of them engines hold as one, and how a layer is swapped in place."""

from collections.abc import Callable, Collection, Iterable
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from transformers.pytorch_utils import Conv1D

from lit_qrl.errors import ConfigError, listed
from lit_qrl.network.experts import ExpertStack, expert_stacks, unknown_experts
from lit_qrl.network.names import base_of, checkpoint_modules, copy_in_use
from lit_qrl.network.structure import FUSED_LAYERS, text_part


def fused_group(name: str) -> str:
    """Return the name of the fused layer that `name` becomes part of in an engine, or `name` itself.

    >>> fused_group("model.layers.0.self_attn.k_proj"), fused_group("model.layers.0.mlp.down_proj")
    ('model.layers.0.self_attn.qkv_proj', 'model.layers.0.mlp.down_proj')
    """
    parent, _, leaf = name.rpartition(".")
    fused = FUSED_LAYERS.get(leaf)
    return name if fused is None else f"{parent}.{fused}" if parent else fused


def fused_groups(names: Iterable[str]) -> dict[str, list[str]]:
    """Return for every fused layer the names among `names` that it is made of, in their order."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(fused_group(name), []).append(name)
    return groups


def quantizable_linears(root: nn.Module, exclude: Collection[str] = (), head: bool = False) -> dict[str, nn.Linear]:
    """Return the linear layers that a format applies to, by their names in the checkpoint.

    Every `nn.Linear` of the text decoder but the output embedding, routers and gates of experts, and what `exclude`
    names; of an adapted layer the one inside the adapter. Image and audio parts stay as they are.

    Args:
        root: the model.
        exclude: globs over layer names, such as `*.down_proj` or `model.layers.0.*`.
        head: take the output embedding too.

    >>> from lit_qrl.network.structure import outline
    >>> from transformers import LlamaConfig
    >>> model = outline(LlamaConfig(num_hidden_layers=1))
    >>> len(quantizable_linears(model)), "lm_head" in quantizable_linears(model)
    (7, False)
    """
    get: Any = getattr(root, "get_output_embeddings", None)
    output = None if get is None else base_of(copy_in_use(get()))
    linears = ((name, base_of(module)) for name, module in checkpoint_modules(root))
    text, routers = set(text_part(root).modules()), routers_of(root)
    return {
        name: module
        for name, module in linears
        if isinstance(module, nn.Linear)
        and name
        and (head if module is output else module in text and module not in routers)
        and not any(fnmatchcase(name, pattern) for pattern in exclude)
    }


def quantizable_layers(
    root: nn.Module, exclude: Collection[str] = (), head: bool = False
) -> dict[str, tuple[int, int]]:
    """Return (out, in) of all that a format applies to by checkpoint name: linear layers, and experts one by one.

    The arguments are those of `quantizable_linears`; globs over experts are those of `expert_stacks`.

    >>> quantizable_layers(nn.ModuleDict({"up_proj": nn.Linear(2, 4)}))
    {'up_proj': (4, 2)}
    """
    linears = quantizable_linears(root, exclude, head)
    shapes = {name: (linear.out_features, linear.in_features) for name, linear in linears.items()}
    for stack in expert_stacks(root, exclude).values():
        shapes |= stack.layers()
    return shapes


def routers_of(root: nn.Module) -> set[nn.Module]:
    """Return the linear layers beside experts that write one number for each of them, or one for all.

    Routers choose experts: an error of 4 or 8 bits there costs far more than the memory it saves.
    """
    found = set()
    for module in root.modules():
        counts = set().union(*(_experts_in(base_of(child)) for child in module.children()))
        for child in module.children() if counts else ():
            linears = [base for _, part in checkpoint_modules(child) if isinstance(base := base_of(part), nn.Linear)]
            if len(linears) == 1 and linears[0].out_features in {1, *counts}:  # alone in a module of its own, too
                found.add(linears[0])
    return found


def _experts_in(module: nn.Module) -> set[int]:
    """Return how many experts a module holds: stacked in tensors "experts · ·", or alike in a list."""
    stack = getattr(module, "stack", None)
    if isinstance(stack, ExpertStack):  # held in a number format
        return {stack.count}
    if isinstance(module, nn.ModuleList):
        alike = len({type(part) for part in module}) == 1 < len(module)
        return {len(module)} if alike and any(isinstance(part, nn.Linear) for part in module[0].children()) else set()
    if isinstance(module, _ConvNd):
        return set()
    return {p.shape[0] for p in module._parameters.values() if p is not None and p.ndim == 3}


@cache
def computes_as_linear(kind: type[nn.Linear]) -> bool:
    """Return True for a class of linear layers whose product is that of `nn.Linear`, found by trying one.

    >>> computes_as_linear(nn.Linear)
    True
    """
    if kind.forward is nn.Linear.forward:
        return True
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        try:
            layer, rows = kind(3, 2), torch.linspace(-1, 1, 6).view(2, 3)
            got = layer(rows)
            return torch.allclose(got, nn.functional.linear(rows, layer.weight, layer.bias))
        except (TypeError, ValueError, AttributeError, RuntimeError):  # made or called otherwise
            return False


def transposed_layers(root: nn.Module) -> list[str]:
    """Return the names in the checkpoint of the layers whose weight is held as "in out" (transformers' Conv1D)."""
    return [name for name, module in checkpoint_modules(root) if isinstance(base_of(module), Conv1D)]


def check_quantizable(
    root: nn.Module, format: str, exclude: Collection[str] = (), where: str = "publisher.exclude"
) -> None:
    """Raise `ConfigError` for matrices of the text decoder that no format applies to, unless `exclude` names them.

    Args:
        root: the model; its weights need not be there.
        format: name of the format.
        exclude: globs over names of layers and of experts' weights.
        where: the setting that holds them, for the error.
    """
    expert_stacks(root, exclude)  # raises for globs that split a layer's experts
    unknown = unknown_experts(root, exclude)
    if unknown:
        raise ConfigError(
            f"{format} does not apply to the experts of {type(root).__name__}: how their matrices lie in one tensor is "
            "not known.",
            expected="experts stacked as transformers' own implementations of experts take them, or publisher.format: "
            "bf16",
            given=listed({name: tuple(one.shape) for name, one in unknown.items()}, 2),
            remedy=f"Set the format to bf16, or add '*.experts' to {where} to quantize the other layers alone.",
        )
    transposed = [
        name for name in transposed_layers(root) if not any(fnmatchcase(name, pattern) for pattern in exclude)
    ]
    if transposed:
        raise ConfigError(
            f"{format} applies to nn.Linear, and this model's layers are transformers' Conv1D, whose weights are "
            "stored transposed.",
            expected="a model made of nn.Linear, such as Qwen's or Llama's",
            given=f"{type(root).__name__} with {listed(transposed, 2)}",
            remedy="Set publisher.format to bf16, or take another model.",
        )
    own = {
        name: type(layer)
        for name, layer in quantizable_linears(root, exclude).items()
        if not getattr(layer, "is_swapped", False) and not computes_as_linear(type(layer))
    }
    if own:
        raise ConfigError(
            f"{format} applies to layers that multiply by their weight, and {next(iter(own.values())).__name__} of "
            "this model computes something else.",
            expected="layers that compute what nn.Linear does",
            given=listed(own, 2),
            remedy=f"Add them to {where}.",
        )


def swap_linears(
    root: nn.Module,
    factory: Callable[[str, nn.Linear], nn.Module],
    exclude: Collection[str] = (),
) -> list[str]:
    """Replace linear layers by what `factory` makes of them, and return their names.

    A second call does nothing: what a swap puts in place must say so by `is_swapped`. A layer that is reachable by two
    names is replaced once, in both places.

    Args:
        root: the model; its own children are changed.
        factory: from name and layer to the new module, which keeps the layer's parameters under their names.
        exclude: globs over names of layers that stay, beside those that are no `quantizable_linears`.

    Raises:
        ConfigError: if no layer matched.
    """
    chosen = quantizable_linears(root, exclude)
    if not chosen:
        raise ConfigError(
            "No linear layer of the policy matched, so nothing would be quantized.",
            expected="at least one nn.Linear beside the output embedding and the routers",
            given=f"{type(root).__name__} without {listed(exclude)}" if exclude else type(root).__name__,
            remedy="Correct the plugin's `exclude` globs, or use a model made of nn.Linear layers.",
        )
    plain = {name: linear for name, linear in chosen.items() if not getattr(linear, "is_swapped", False)}
    replaced: dict[nn.Module, nn.Module] = {linear: factory(name, linear) for name, linear in plain.items()}
    for parent in list(root.modules()):
        # not `named_children`, which leaves out the second name of a shared layer
        for child_name, child in list(parent._modules.items()):
            if child in replaced:
                setattr(parent, child_name, replaced[child])
    return list(plain)
