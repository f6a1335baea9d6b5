"""What an engine in another process is told of the learner's model: its class, config and dtype, and no weight."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn

from lit_qrl.network.padding_free import padded_attention
from lit_qrl.run.description import plain_class


@dataclass(frozen=True)
class Blueprint:
    """From which a server builds the learner's model without memory for its weights, as `EnginePolicy` has it.

    Args:
        kind: the Hugging Face class.
        config: of the model.
        dtype: of the learner's weights.
    """

    kind: type
    config: Any
    dtype: torch.dtype

    @property
    def network(self) -> nn.Module:
        """The model; its parameters have no memory."""
        kind: Any = self.kind
        config = copy.deepcopy(self.config)
        # The learner's own lays rows end to end, which only its process has registered.
        attention = padded_attention(config.get_text_config()._attn_implementation)
        with init_empty_weights(include_buffers=False):
            built = kind._from_config(config, attn_implementation=attention)
        built.tie_weights()  # what was tied inside is two parameters now
        for parameter in built.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(self.dtype)
        return built.eval()


def blueprint(network: Any) -> Blueprint:
    """Return what another process needs of a learner's model.

    Args:
        network: a Hugging Face model, with or without weights, adapters, or layers that a precision plugin put in.
    """
    floating = (parameter.dtype for parameter in network.parameters() if parameter.is_floating_point())
    return Blueprint(plain_class(network), copy.deepcopy(network.config), next(floating, torch.float32))
