"""What learner and sampler ask of a Hugging Face causal language model: its output head and its checkpoint tensors."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from peft import get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn

from lit_qrl.errors import ConfigError
from lit_qrl.functional.logprobs import token_logprobs
from lit_qrl.network.linears import quantizable_linears
from lit_qrl.precision.packed_lora import PackedLinear


def check_positions(config: Any, prompt: int, drawn: int, remedy: str) -> None:
    """Raise `ConfigError` when a model has not as many positions as a prompt and its completion take.

    Args:
        config: the model's.
        prompt: tokens of the longest prompt.
        drawn: tokens of the longest completion.
        remedy: which settings to lower.
    """
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and prompt + drawn > positions:
        raise ConfigError(
            "The model cannot hold the longest sequence.",
            expected=f"at most {positions} positions",
            given=f"a prompt of {prompt} tokens and up to {drawn} drawn ones",
            remedy=remedy,
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
    try:
        return get_peft_model(network, config)
    except ValueError as error:
        linears = sorted({name.rpartition(".")[2] for name in quantizable_linears(network)})
        raise ConfigError(
            f"model.policy.lora does not fit {source}: {str(error).rstrip('.')}.",
            expected=f"target_modules among its linear layers, {', '.join(linears)}" if linears else None,
            remedy="Correct model.policy.lora; target_modules: all-linear takes all of them.",
        ) from error


def output_head(network: Any) -> dict[str, Any]:
    """Return weight, bias, scale and soft-cap of the output embedding, as `token_logprobs` takes them.

    Raises:
        ConfigError: when the output embedding is not a plain linear layer.
    """
    head = merged_module(network.get_output_embeddings())
    if isinstance(head, BaseTunerLayer) or not isinstance(head, nn.Linear):
        raise ConfigError(
            "The output embedding must stay a plain linear layer.",
            given=type(head).__name__,
            remedy="Leave lm_head out of the adapter's target_modules and of every quantization.",
        )
    return {"weight": head.weight, "bias": head.bias, **_shape_of_logits(network.config)}


def check_head(network: Any) -> None:
    """Raise `ConfigError` when the output embedding cannot be published in a number format.

    Args:
        network: the learner's Hugging Face model.
    """
    head, embedding = network.get_output_embeddings(), network.get_input_embeddings()
    if merged_module(head) is not head or not isinstance(head, nn.Linear):
        raise ConfigError(
            "publisher.quantize_head takes an output head that is a plain linear layer.",
            given=type(head).__name__,
            remedy="Leave lm_head out of the adapter, or set quantize_head to false.",
        )
    if head.weight is merged_module(embedding).weight:
        raise tied_head(network.config)


def tied_head(config: Any) -> ConfigError:
    """Return the error of a model whose output head cannot be published in a format, since it is the embedding."""
    return ConfigError(
        "publisher.quantize_head would quantize the input embedding, which is this model's output head too.",
        expected="a model with tie_word_embeddings: false",
        given=f"a {config.model_type} model that ties them",
        remedy="Set quantize_head to false.",
    )


def merged_module(module: Any) -> Any:
    """Return the trained copy of a module that PEFT keeps beside the original one, or the module itself."""
    if not isinstance(module, ModulesToSaveWrapper):
        return module
    return module.original_module if module.disable_adapters else module.modules_to_save[module.active_adapters[0]]


def merged_weights(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the network's weights and persistent buffers under their checkpoint names, PEFT adapters merged in.

    A layer is merged into a copy of its weight, which is yielded and dropped before the next; the learner's own weight
    comes back bit for bit. A weight that two modules share is yielded once, under its first name.
    """
    yield from _walk(network, "", set(), merge=True)


def base_weights(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the same names as `merged_weights` with the weights that the adapters stand beside."""
    yield from _walk(network, "", set(), merge=False)


def _walk(module: nn.Module, prefix: str, seen: set[int], merge: bool) -> Iterator[tuple[str, Tensor]]:
    module = merged_module(module)
    if isinstance(module, BaseTunerLayer) and hasattr(module, "base_layer"):
        if not merge:
            yield from _walk(module.get_base_layer(), prefix, seen, merge)
        elif isinstance(module.get_base_layer(), PackedLinear):
            yield from _merged_packed(module, prefix, seen)
        else:
            yield from _merged(module, prefix, seen)
        return
    if isinstance(module, PackedLinear):
        yield prefix + "weight", module.dequantized(torch.get_default_dtype())
    own = {**module._parameters, **module._buffers}
    for name, tensor in own.items():
        if tensor is not None and name not in module._non_persistent_buffers_set and id(tensor) not in seen:
            seen.add(id(tensor))
            yield prefix + name, tensor.detach()
    for name, child in module.named_children():
        yield from _walk(child, f"{prefix}{name}.", seen, merge)


@torch.no_grad()
def _merged_packed(layer: Any, prefix: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """A packed base has no weight to merge into: it is multiplied out in fp32, and the sum is the adapter's dtype."""
    base = layer.get_base_layer()
    for name, tensor in _walk(base, prefix, seen, merge=True):
        if name == prefix + "weight":
            tensor = base.dequantized(torch.float32)
            adapters = [adapter for adapter in layer.active_adapters if adapter in layer.lora_A]
            for adapter in adapters:
                tensor += layer.get_delta_weight(adapter).float()
            tensor = tensor.to(layer.lora_A[adapters[0]].weight.dtype) if adapters else tensor
        yield name, tensor


def _merged(layer: Any, prefix: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    base = layer.get_base_layer()
    originals = {name: parameter.data for name, parameter in base.named_parameters()}
    layer.merge(safe_merge=True)
    merged = dict(_walk(base, prefix, seen, merge=True))
    for name, parameter in base.named_parameters():
        parameter.data = originals[name]
    layer.merged_adapters.clear()
    del originals
    while merged:
        name = next(iter(merged))
        yield name, merged.pop(name)


@dataclass(frozen=True)
class SamplerHead:
    """The output head of a sampler, plain or quantized.

    Args:
        layer: from hidden states to raw logits.
        softcap: c of c · tanh(z / c), or None.
        scale: that raw logits are multiplied by.
    """

    layer: nn.Module
    softcap: float | None
    scale: float

    @classmethod
    def of(cls, network: Any) -> "SamplerHead":
        """Return the head of a sampler's network."""
        return cls(network.get_output_embeddings(), **_shape_of_logits(network.config))

    @property
    def plain(self) -> dict[str, Any] | None:
        """Weight, bias, scale and soft-cap as `token_logprobs` takes them, or None for a quantized head."""
        if not isinstance(self.layer, nn.Linear):
            return None
        return {"weight": self.layer.weight, "bias": self.layer.bias, "softcap": self.softcap, "scale": self.scale}

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits "… v" of hidden states "… h", in their dtype."""
        logits = self.layer(hidden)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def logprobs(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Return log p "rows t" (fp32, T = 1) of `tokens` "rows t" after hidden states "rows t h"."""
        if self.plain is not None:
            return token_logprobs(hidden, tokens=tokens, **self.plain)[0]
        return self.logits(hidden).float().log_softmax(dim=-1).gather(-1, tokens[..., None])[..., 0]


def _shape_of_logits(config: Any) -> dict[str, Any]:
    config = config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1.0)
    return {"softcap": getattr(config, "final_logit_softcapping", None), "scale": scale}
