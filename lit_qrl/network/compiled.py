"""Decoder layers that torch compiles into a few kernels each."""

import logging
from typing import Any

import torch
from transformers import AttentionInterface

from lit_qrl.errors import ConfigError
from lit_qrl.network.padding_free import ATTENTION, attend
from lit_qrl.network.structure import decoder_layers

log = logging.getLogger(__name__)


def checked(compile: bool, lora: Any) -> bool:
    """Return whether to compile; raise `ConfigError` beside an adapter, whose layers pass tensors to one another."""
    if compile and lora is not None:
        raise ConfigError(
            "Layers under an adapter are not compiled: their own kernels make both terms of a product together.",
            given="model.policy.compile: true and model.policy.lora",
            remedy="Set model.policy.compile to false.",
        )
    return compile


def compile_layers(network: Any, backend: str = "inductor") -> int:
    """Let torch compile each decoder layer of a model at its first call, and return how many there are.

    One compilation serves all layers of a kind, for any number of tokens; training, scoring and a layer's repetition in
    the backward pass have one each. Names of parameters stay, and a copy of the model is a plain one. Attention over
    the rows of a layout stays as it is: its number of calls follows from the completions' lengths.

    Args:
        network: a causal language model.
        backend: of torch's compiler.
    """
    AttentionInterface.register(ATTENTION, torch.compiler.disable(attend))
    layers = list(decoder_layers(network)[1])
    for layer in layers:
        layer.compile(dynamic=True, backend=backend)
    log.info("torch compiles %d decoder layers: the first passes take up to some minutes more.", len(layers))
    return len(layers)
