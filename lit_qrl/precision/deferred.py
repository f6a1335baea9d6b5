"""Weights that come layer by layer: a model that is packed at once need never exist in full precision."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor, nn

from lit_qrl.errors import ConfigError
from lit_qrl.network.folder import FolderReader

_wanted: ContextVar[Literal["", "bases", "all"]] = ContextVar("lit_qrl_deferred_weights", default="")


@contextmanager
def deferred_weights(whole_policies: bool = False) -> Iterator[None]:
    """Let policies that are configured inside leave their weights to `DeferredWeights`.

    Args:
        whole_policies: those that train all their weights too, not bases under an adapter alone.
    """
    token = _wanted.set("all" if whole_policies else "bases")
    try:
        yield
    finally:
        _wanted.reset(token)


def weights_are_deferred(adapted: bool = True) -> bool:
    """Return whether the code runs inside `deferred_weights`.

    Args:
        adapted: the weights are the base of an adapter.

    >>> with deferred_weights():
    ...     weights_are_deferred()
    True
    >>> weights_are_deferred()
    False
    """
    return _wanted.get() in (("bases", "all") if adapted else ("all",))


class DeferredWeights:
    """Draws or reads the weights of a model that was built without any.

    Until a module is filled, its parameters are one number seen in the parameter's shape: they have its device, dtype
    and shape, so that an adapter can be put around them, and no memory.

    Args:
        build: makes the model, a Hugging Face one, on the current default device.
        read: from a parameter's name to its values; None draws them as the model's initialisation says.

    >>> from transformers import AutoModelForCausalLM, LlamaConfig
    >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    >>> config = LlamaConfig(vocab_size=8, **sizes)
    >>> weights = DeferredWeights(lambda: AutoModelForCausalLM.from_config(config))
    >>> head = weights.network.lm_head
    >>> head.weight.shape, head.weight.untyped_storage().nbytes()
    (torch.Size([8, 8]), 4)
    >>> weights.fill(head)
    >>> head.weight.untyped_storage().nbytes()
    256
    """

    def __init__(self, build: Callable[[], Any], read: Callable[[str], Tensor] | None = None) -> None:
        from accelerate import init_empty_weights

        device = torch.get_default_device()
        with init_empty_weights(include_buffers=False):
            self.network = build()
        self.network.tie_weights()  # what was tied inside is two parameters now
        self.read = read
        # PEFT renames them later
        names = {id(parameter): name for name, parameter in self.network.named_parameters()}
        self._names: dict[int, str] = {}
        self._waiting: dict[int, nn.Parameter] = {}
        # How many modules hold a placeholder (a tied output embedding shares one), and what took its place in some.
        self._places: Counter[int] = Counter()
        # What a plugin has put in the place of a family's module does not say how its weights are drawn.
        self._origins: dict[int, nn.Module] = {}
        self._family = WeakSet(self.network.modules())
        self._filled: dict[int, nn.Parameter] = {}
        placeholders: dict[int, nn.Parameter] = {}
        for module in self.network.modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in placeholders:
                    one = torch.zeros((), dtype=parameter.dtype, device=device)
                    placeholders[id(parameter)] = nn.Parameter(one.expand(parameter.shape), parameter.requires_grad)
                placeholder = placeholders[id(parameter)]
                self._names[id(placeholder)] = names[id(parameter)]
                self._origins.setdefault(id(placeholder), module)
                # kept alive here, so that no other parameter can get its identity
                self._waiting[id(placeholder)] = placeholder
                self._places[id(placeholder)] += 1
                module._parameters[name] = placeholder

    @torch.no_grad()
    def fill(self, module: nn.Module) -> None:
        """Draw or read a module's own parameters; what is there already stays."""
        drawn: nn.Module | None = None
        for name, parameter in module._parameters.items():
            key = id(parameter)
            if parameter is None or key not in self._waiting:
                continue
            if key not in self._filled:
                fresh = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
                if self.read is not None:
                    fresh.copy_(self.read(self._names[key]).to(fresh.device))  # in the folder's dtype, there widened
                self._filled[key] = nn.Parameter(fresh, parameter.requires_grad)
                if self.read is None:
                    drawn = module if module in self._family else self._origins[key]
            module._parameters[name] = self._filled[key]
            self._places[key] -= 1
            if not self._places[key]:
                del self._filled[key], self._origins[key]
        if drawn is not None:
            before, drawn._parameters = drawn._parameters, module._parameters
            self.network._init_weights(drawn)
            drawn._parameters = before

    def twin(self) -> Any:
        """Return a copy of the model whose weights are to be filled as the model's own are, with the same numbers."""
        copied = copy.deepcopy(self.network, dict(self._waiting))  # placeholders are what they are
        self._family.update(copied.modules())
        for module in copied.modules():
            self._places.update(id(one) for one in module._parameters.values() if id(one) in self._waiting)
        return copied

    def fill_all(self) -> None:
        """Draw or read whatever is still missing."""
        for module in list(self.network.modules()):
            self.fill(module)
        self._waiting.clear()
        self._filled.clear()


def deferred_folder(folder: Path, build: Callable[[], Any]) -> DeferredWeights | None:
    """Return the weights of a plain folder, to be read layer by layer, or None where only transformers can read it.

    That is a folder without safetensors, one whose tensors are not the model's own by name and shape (transformers
    renames and stacks some), and a model with buffers that are stored or layers that it keeps in fp32.

    Args:
        folder: of a Hugging Face model.
        build: makes the model, in the dtype that it shall have, on the current default device.
    """
    try:
        reader = FolderReader(folder)
    except ConfigError:
        return None
    weights = DeferredWeights(build, lambda name: reader.read([name])[name])
    network = weights.network
    kept = (getattr(network, f"_keep_in_fp32_modules{end}", None) for end in ("", "_strict"))
    parameters = dict(network.named_parameters(remove_duplicate=False))
    if any(kept) or set(network.state_dict()) - set(parameters):
        return None
    own = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    # a tied weight may be stored under both names
    known = all(reader.shapes.get(name) == shape for name, shape in own.items())
    return weights if known and set(reader.names) <= set(parameters) else None
