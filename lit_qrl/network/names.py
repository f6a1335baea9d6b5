"""A network as its checkpoint names it, whatever PEFT put into it; nothing else knows PEFT's names for that."""

import re
from collections.abc import Iterator
from typing import Any

from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

_BASE, _TRAINED_COPIES = "base_layer", "modules_to_save"
_TRAINED_ROWS = "token_adapter"
_PREFIXES = tuple(set(PEFT_TYPE_TO_PREFIX_MAPPING.values()))
"""How PEFT begins the names of its own modules, one for each kind of adapter."""


def checkpoint_name(name: str) -> str:
    """Return the name that a module or parameter has in the checkpoint of the model without an adapter.

    >>> checkpoint_name("layers.0.q_proj.base_layer.weight"), checkpoint_name("norm.modules_to_save.default.weight")
    ('layers.0.q_proj.weight', 'norm.weight')
    """
    parts = name.split(".")
    if _TRAINED_COPIES in parts:  # the adapter's name follows
        cut = parts.index(_TRAINED_COPIES)
        parts = parts[:cut] + parts[cut + 2 :]
    return ".".join(part for part in parts if part not in (_BASE, _TRAINED_ROWS))


def is_adapter(name: str) -> bool:
    """Return whether a module or parameter of that name is a part of an adapter beside the model's own layers.

    >>> is_adapter("layers.0.q_proj.lora_A.default.weight"), is_adapter("layers.0.q_proj.base_layer.weight")
    (True, False)
    """
    return any(part.startswith(_PREFIXES) for part in name.split("."))


def is_saved_with_adapter(name: str) -> bool:
    """Return whether an adapter's checkpoint holds that parameter: its own ones, and copies that it trains.

    >>> [is_saved_with_adapter(f"norm.{part}.weight") for part in ("modules_to_save.default", "original_module")]
    [True, False]
    """
    return is_adapter(name) or _TRAINED_COPIES in name.split(".")


def is_adapted(module: nn.Module) -> bool:
    """Return whether a module is PEFT's layer around one of the model's."""
    return isinstance(module, BaseTunerLayer) and hasattr(module, _BASE)


def base_of(module: Any) -> Any:
    """Return the model's own layer inside PEFT's, or the module itself."""
    return module.get_base_layer() if isinstance(module, BaseTunerLayer) else module


def copy_in_use(module: Any) -> Any:
    """Return the trained copy of a module that PEFT keeps beside the original one, or the module itself.

    Of an embedding with rows that are trained, it is PEFT's layer around the model's own.
    """
    if isinstance(module, TrainableTokensWrapper):
        return module.token_adapter
    if not isinstance(module, ModulesToSaveWrapper):
        return module
    return module.original_module if module.disable_adapters else module.modules_to_save[module.active_adapters[0]]


def checkpoint_modules(network: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the model's modules by their names in the checkpoint, each once; an adapted one as PEFT's layer around it.

    Args:
        network: a model, with or without an adapter inside.
    """
    seen: set[nn.Module] = set()

    def walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        module = copy_in_use(module)
        if module in seen:
            return
        seen.add(module)
        yield name, module
        for child, part in base_of(module).named_children():
            yield from walk(f"{name}.{child}" if name else child, part)

    yield from walk("", network)


def stored(network: Any, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return a tensor of the model under the names that a checkpoint on the hub has for it.

    Experts, which a model in memory holds stacked, are stored one by one, some layers have other names there, and
    some of vLLM's loaders know no others.

    Args:
        network: a Hugging Face model, whose class says what is stored how.
        name: in the model.
        tensor: of that name.
    """
    return revert_weight_conversion(network, {name: tensor})


def kept_in_fp32(network: nn.Module) -> frozenset[str]:
    """Return the names of tensors that a model keeps in fp32 whatever dtype it has, as it says itself.

    Args:
        network: a Hugging Face model, with or without an adapter inside.
    """
    asked = [re.escape(pattern) for pattern in getattr(network, "_keep_in_fp32_modules_strict", None) or ()]
    if not asked:
        return frozenset()
    wanted = re.compile(rf"(^|\.)({'|'.join(asked)})(\.|$)")
    names = (
        f"{prefix}.{name}" if prefix else name
        for prefix, module in checkpoint_modules(network)
        for name in (*base_of(module)._parameters, *base_of(module)._buffers)
    )
    return frozenset(name for name in names if wanted.search(name))


def become(module: nn.Module, kind: type[nn.Module]) -> None:
    """Let a module be of a class of ours over its own, in place; a second call changes nothing.

    Args:
        module: whose parameters, parts and class name stay.
        kind: whose methods come before those of the module's class.

    >>> layer = nn.Linear(1, 1)
    >>> become(layer, type("Ours", (nn.Module,), {}))
    >>> type(layer).__name__, type(layer).__mro__[1].__name__
    ('Linear', 'Ours')
    """
    if not isinstance(module, kind):
        own = type(module)
        module.__class__ = type(own.__name__, (kind, own), {"__module__": own.__module__})


def put_layer(network: nn.Module, name: str, layer: nn.Module) -> None:
    """Put a layer in the place of the model's own one, inside the adapter where there is one.

    Args:
        network: whose module is exchanged.
        name: its name in the checkpoint.
        layer: the new one.
    """
    parent, _, child = name.rpartition(".")
    owner = network.get_submodule(parent)
    inside = getattr(owner, child)
    if is_adapted(inside):
        setattr(inside, _BASE, layer)
    else:
        setattr(owner, child, layer)
