"""The output head of a causal language model: where it is, and what becomes of its logits."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lit_qrl.errors import ConfigError
from lit_qrl.functional.logprobs import raised_linear, token_logprobs
from lit_qrl.network.names import base_of, copy_in_use, is_adapted


def output_head(network: Any) -> dict[str, Any]:
    """Return weight, bias, scale and soft-cap of the output embedding, as `token_logprobs` takes them.

    Raises:
        ConfigError: when the output embedding is not a plain linear layer.
    """
    head = copy_in_use(network.get_output_embeddings())
    if is_adapted(head) or not isinstance(head, nn.Linear):
        raise ConfigError(
            "The output embedding must stay a plain linear layer.",
            given=type(head).__name__,
            remedy="Leave lm_head out of the adapter's target_modules and of every quantization.",
        )
    return {"weight": head.weight, "bias": head.bias, **_shape_of_logits(network.config)}


def check_tied(network: Any) -> None:
    """Raise `ConfigError` when an adapter trains two copies of the weight that the model's two embeddings share.

    Args:
        network: the learner's Hugging Face model.
    """
    head, embedding = output_head(network)["weight"], base_of(copy_in_use(network.get_input_embeddings()))
    if network.config.get_text_config().tie_word_embeddings and head is not embedding.weight:
        raise ConfigError(
            "The adapter unties the output embedding from the input embedding, which this model shares.",
            remedy="Set model.policy.lora.ensure_weight_tying to true, or leave both out of modules_to_save.",
        )


def check_head(network: Any) -> None:
    """Raise `ConfigError` when the output embedding cannot be published in a number format.

    Args:
        network: the learner's Hugging Face model.
    """
    head, embedding = network.get_output_embeddings(), network.get_input_embeddings()
    if copy_in_use(head) is not head or not isinstance(head, nn.Linear):
        raise ConfigError(
            "publisher.quantize_head takes an output head that is a plain linear layer.",
            given=type(head).__name__,
            remedy="Leave lm_head out of the adapter, or set quantize_head to false.",
        )
    if head.weight is base_of(copy_in_use(embedding)).weight:
        raise tied_head(network.config)


def tied_head(config: Any) -> ConfigError:
    """Return the error of a model whose output head cannot be published in a format, since it is the embedding."""
    return ConfigError(
        "publisher.quantize_head would quantize the input embedding, which is this model's output head too.",
        expected="a model with tie_word_embeddings: false",
        given=f"a {config.model_type} model that ties them",
        remedy="Set quantize_head to false.",
    )


@dataclass(frozen=True)
class SamplerHead:
    """The output head of a sampler, plain or quantized.

    Args:
        layer: from hidden states to raw logits.
        softcap: c of c · tanh(z / c), or None.
        scale: that raw logits are multiplied by.
        dtype: that a plain layer computes in; None is its own.
    """

    layer: nn.Module
    softcap: float | None
    scale: float
    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, network: Any, dtype: torch.dtype | None = None) -> "SamplerHead":
        """Return the head of a sampler's network."""
        return cls(network.get_output_embeddings(), **_shape_of_logits(network.config), dtype=dtype)

    @property
    def plain(self) -> dict[str, Any] | None:
        """Weight, bias, scale and soft-cap as `token_logprobs` takes them, or None for a quantized head."""
        if not isinstance(self.layer, nn.Linear):
            return None
        options = {"softcap": self.softcap, "scale": self.scale, "head_dtype": self.dtype}
        return {"weight": self.layer.weight, "bias": self.layer.bias, **options}

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits "… v" of hidden states "… h", in their dtype or the head's own."""
        if self.dtype is not None and isinstance(self.layer, nn.Linear):
            with torch.autocast(hidden.device.type, enabled=False):
                logits = raised_linear(hidden, self.layer.weight, self.layer.bias, self.dtype)
        else:
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
