"""Adapters around a network: how one is put there, and the model's weights with it merged in or beside it."""

import copy
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from peft import LoftQConfig, LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear, ParamWrapper
from peft.utils import transformers_weight_conversion
from torch import Tensor, nn

from lit_qrl.errors import ConfigError
from lit_qrl.network.experts import ExpertList, expert_stacks, expert_weights
from lit_qrl.network.linears import quantizable_linears, routers_of
from lit_qrl.network.names import base_of, checkpoint_modules, checkpoint_name, is_adapted
from lit_qrl.network.quantized_linear import QuantizedLinear
from lit_qrl.network.shards import gathered, whole

log = logging.getLogger(__name__)


def check_adapter(config: Any) -> None:
    """Raise `ConfigError` for a PEFT config that changes no weights; None is fine."""
    if config is not None and config.is_prompt_learning:
        raise ConfigError(
            "model.policy.lora is a prompt-learning method, which has no weights that a rollout engine could load.",
            expected="a PEFT config that changes weights, such as peft.LoraConfig",
            given=type(config).__name__,
        )


def with_adapter(network: Any, config: Any, source: object) -> Any:
    """Return the PEFT model around `network`; its layers are changed in place.

    Args:
        network: a Hugging Face model.
        config: the adapter's.
        source: where the model comes from, for errors.

    Raises:
        ConfigError: for an adapter that does not fit the model.
    """
    config.task_type = config.task_type or "CAUSAL_LM"
    linears = sorted({name.rpartition(".")[2] for name in quantizable_linears(network)})
    routers, experts = routers_of(network), {network.get_submodule(name) for name in expert_stacks(network)}
    names_meant: AbstractContextManager[None] = nullcontext()
    if getattr(config, "target_modules", None) == "all-linear" and expert_stacks(network):
        config.target_modules = rf"(?!.*\bexperts\.).*\.({'|'.join(map(re.escape, linears))})"
        names_meant = _taken_literally()
        log.info("target_modules: all-linear adapts %s; experts and routers stay as they are.", ", ".join(linears))
    try:
        with names_meant:
            adapted = get_peft_model(network, config)
    except ValueError as error:
        raise ConfigError(
            f"model.policy.lora does not fit {source}: {str(error).rstrip('.')}.",
            expected=f"target_modules among its linear layers, {', '.join(linears)}" if linears else None,
            remedy="Correct model.policy.lora; target_modules: all-linear takes all of them.",
        ) from error
    parts = ((name, part) for name, part in adapted.named_modules() if is_adapted(part))
    others = [
        name
        for name, part in parts
        if base_of(part) in routers or (isinstance(part, ParamWrapper) and base_of(part) not in experts)
    ]
    if others:
        raise ConfigError(
            f"model.policy.lora adapts more than linear layers and experts of {source}, which no engine can be sent.",
            expected=f"target_modules among its linear layers: {', '.join(linears)}",
            given=checkpoint_name(min(others, key=len).removeprefix("base_model.model.")),
            remedy="Name them in model.policy.lora.target_modules in place of all-linear.",
        )
    return adapted


@contextmanager
def _taken_literally() -> Iterator[None]:
    """Keep PEFT from taking `gate_proj` of a dense layer for the experts', which had that name before the stack."""
    kept = transformers_weight_conversion.convert_peft_config_for_transformers
    transformers_weight_conversion.convert_peft_config_for_transformers = lambda *_, **__: None
    try:
        yield
    finally:
        transformers_weight_conversion.convert_peft_config_for_transformers = kept


def check_fits(network: Any, config: Any, source: object) -> None:
    """Raise `ConfigError` where `with_adapter` would; only models with experts are looked at.

    Args:
        network: an `outline` of the model; it is not fit for anything else afterwards.
        config: the adapter's, or None.
        source: where the model comes from, for errors.
    """
    if isinstance(config, LoraConfig) and not starts_from_base(config) and expert_weights(network):
        with torch.device("meta"):
            with_adapter(network, copy.deepcopy(config), source)


def starts_from_base(config: object) -> bool:
    """Return whether an adapter is made from the weights of the base, which must be there then.

    Args:
        config: PEFT's.

    >>> starts_from_base(LoraConfig()), starts_from_base(LoraConfig(init_lora_weights="pissa"))
    (False, True)
    """
    if not isinstance(config, LoraConfig):
        return False
    return config.use_dora or config.init_lora_weights not in (True, False, "gaussian")


def check_separable(config: Any) -> None:
    """Raise `ConfigError` for a PEFT config whose effect is more than a low-rank term beside a linear layer.

    Args:
        config: the policy's PEFT config.
    """
    options = ("use_dora", "modules_to_save", "trainable_token_indices", "bias", "target_parameters")
    used = [one for one in options if getattr(config, one, None) and getattr(config, one) != "none"]
    kind = str(getattr(getattr(config, "peft_type", None), "value", "LORA"))
    if used or kind != "LORA":
        raise ConfigError(
            f"An adapter with {', '.join(used) or kind} cannot be published apart from its base.",
            expected="plain LoRA on linear layers",
            remedy="Drop the option, or set publisher.lora to merged.",
        )


def merged_weights(network: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield the network's weights and persistent buffers under their checkpoint names, PEFT adapters merged in.

    A layer is merged into a copy of its weight, which is yielded and dropped before the next; the learner's own weight
    comes back bit for bit. A weight that two modules share is yielded once, under its first name.

    Args:
        network: the learner's, adapter layers inside.
        dtype: of weights that are held packed; None takes the adapter's, and torch's default where there is none.
    """

    def read(module: nn.Module) -> dict[str, Tensor]:
        return merged_tensors(module, dtype) if is_adapted(module) else _multiplied_out(module, dtype)

    yield from _weights(network, read)


def base_weights(network: nn.Module, multiply_out: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield the same names as `merged_weights` with the weights that the adapters stand beside.

    Args:
        network: the learner's, adapter layers inside.
        multiply_out: False yields an empty tensor for a weight that is held packed.
    """

    def read(module: nn.Module) -> dict[str, Tensor]:
        base = base_of(module)
        if multiply_out:
            return _multiplied_out(base)
        return {"weight": torch.empty(0)} if isinstance(base, QuantizedLinear) else {}

    yield from _weights(network, read, apart=not multiply_out)


def _weights(
    network: nn.Module, read: Callable[[nn.Module], dict[str, Tensor]], apart: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield weights and persistent buffers; `read` says what is yielded in place of a module's own, or beside them.

    Experts that are held apart come in the stack that the model has of them, or one by one where `apart` is True.
    """
    lists = [] if apart else [one for one in network.modules() if isinstance(one, ExpertList)]
    inside = {part for one in lists for part in one.modules() if part is not one}
    seen: set[int] = set()
    replaced: dict[int, Tensor] = {}
    for prefix, module in checkpoint_modules(network):
        if module in inside:
            continue
        prefix, base = f"{prefix}." if prefix else "", base_of(module)
        with gathered(module) if module is not base else nullcontext():
            found = read(module)
        for name, tensor in found.items():
            if (parameter := dict(base.named_parameters()).get(name)) is None:
                yield prefix + name, tensor
            else:
                replaced[id(parameter)] = tensor
        for name, tensor in {**base._parameters, **base._buffers}.items():
            if tensor is not None and name not in base._non_persistent_buffers_set and id(tensor) not in seen:
                seen.add(id(tensor))
                yield prefix + name, whole(replaced.pop(id(tensor), tensor).detach())


def _multiplied_out(module: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    if isinstance(module, ExpertList):
        return module.joined(lambda layer: layer.dequantized(dtype or torch.get_default_dtype()))
    if not isinstance(module, QuantizedLinear):
        return {}
    return {"weight": module.dequantized(dtype or torch.get_default_dtype())}


@torch.no_grad()
def merged_tensors(layer: Any, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return what the parameters of an adapted layer are with the adapter merged in, by name; its own stay as they are.

    Args:
        layer: PEFT's.
        dtype: of a weight that is held packed, which is multiplied out and summed in fp32; None takes the adapter's.
    """
    base = base_of(layer)
    if isinstance(base, QuantizedLinear):
        weight = base.dequantized(torch.float32)
        adapters = [adapter for adapter in layer.active_adapters if adapter in layer.lora_A]
        for adapter in adapters:
            weight += layer.get_delta_weight(adapter).float()
        factors = [layer.lora_A[adapter].weight.dtype for adapter in adapters]
        return {"weight": weight.to(dtype or next(iter(factors), torch.float32))}
    parameters = dict(base.named_parameters())
    own = {name: parameter.data for name, parameter in parameters.items()}
    adapters = [adapter for adapter in layer.active_adapters if adapter in getattr(layer, "lora_A", ())]
    if isinstance(layer, Linear) and not any(a in layer.lora_variant or layer.lora_bias[a] for a in adapters):
        # PEFT's own sum of a plain LoRA; its `merge` looks for NaN in each layer, for which the host would wait.
        for adapter in adapters:
            own["weight"] = own["weight"] + layer.get_delta_weight(adapter).to(own["weight"].dtype)
        return own
    layers = [layer]
    while layers[-1].base_layer is not base:  # of experts each matrix has a layer of PEFT's, one around the other
        layers.append(layers[-1].base_layer)
    for one in layers:
        one.merge(safe_merge=True)
    merged = {name: parameter.data for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        parameter.data = own[name]
    for one in layers:
        one.merged_adapters.clear()
    return merged


@torch.no_grad()
def lost_in_merge(network: nn.Module, rounded: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    r"""Return the share of an adapter's update that is lost where it is summed into rounded weights.

    $\sqrt{\sum \lVert r(W + \Delta W) - r(W) - \Delta W \rVert^2 / \sum \lVert \Delta W \rVert^2}$ over all adapted
    layers, $\Delta W = s B A$. Above 1 the rounding is larger than the update; 0 where there is none yet.

    Args:
        network: the learner's, adapter layers inside.
        rounded: what publishing makes of a weight "out in"; None rounds to the weight's own dtype.

    Returns:
        A scalar in fp32.
    """
    lost = kept = torch.zeros((), dtype=torch.float32)
    for layer in network.modules():
        base = base_of(layer)
        if not is_adapted(layer) or not isinstance(layer, Linear) or isinstance(base, QuantizedLinear):
            continue
        update = torch.stack([layer.get_delta_weight(adapter).float() for adapter in layer.active_adapters]).sum(dim=0)
        weight, make = base.weight, rounded or (lambda full, like=base.weight: full.to(like.dtype))
        before, after = (make(one).float() for one in (weight.float(), weight.float() + update))
        lost = lost.to(weight.device) + (after - before - update).square().sum()
        kept = kept.to(weight.device) + update.square().sum()
    return (lost / kept.clamp(min=torch.finfo(torch.float32).tiny)).sqrt()


def drop_loftq(policy: Any) -> None:
    """Leave out of a parsed policy the default of `loftq_config`, which PEFT would take for a wish of the user's."""
    try:
        lora = policy.init_args.lora.init_args
        if lora.init_lora_weights != "loftq" and vars(lora.loftq_config) == vars(LoftQConfig()):
            del lora["loftq_config"]
    except (AttributeError, TypeError):  # no adapter, one without LoftQ, or none of these classes
        return
