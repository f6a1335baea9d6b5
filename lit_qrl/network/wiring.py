"""What reads the output of what: found by running the model on a few tokens, whatever its layers are called."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lit_qrl.network.experts import expert_stacks, expert_weights
from lit_qrl.network.linears import quantizable_linears
from lit_qrl.network.modes import evaluating
from lit_qrl.network.names import base_of, checkpoint_modules
from lit_qrl.network.quantized_linear import QuantizedLinear

TOKENS = 4
"""Enough that no norm's output is as large as another tensor by chance."""


@torch.no_grad()
def norms_before_projections(network: Any) -> dict[str, list[str]]:
    """Return the names of the norms that linear layers or experts read, each with the names of those that read it.

    Norms of queries, keys and heads, final norms, and norms of a layer's output are none of these.

    Args:
        network: a Hugging Face causal language model with its weights, adapters inside or not; it is run once.
    """
    modules = list(checkpoint_modules(network))
    packed = {name for name, module in modules if isinstance(base_of(module), QuantizedLinear)}
    linears = packed | set(quantizable_linears(network))
    experts = set(expert_stacks(network)) | {name.rpartition(".")[0] for name in expert_weights(network)}
    written: list[tuple[str, Tensor]] = []
    readers: dict[str, list[str]] = {}

    def note(name: str, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        made = output[0] if isinstance(output, tuple) else output  # beside the sum that a fused norm is the norm of
        if isinstance(made, Tensor):
            written.append((f"{name}.weight", made))  # kept, so that no other tensor takes its place

    def look(name: str, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        for given in (one for one in (*arguments, *keywords.values()) if isinstance(one, Tensor)):
            for norm, output in written:
                if output.data_ptr() == given.data_ptr() and output.numel() == given.numel():
                    readers.setdefault(norm, []).append(name)

    handles = []
    for name, module in modules:
        weight = getattr(base_of(module), "weight", None)
        if name in linears or name in experts:  # an adapter's layer around it, which may multiply by its weight itself
            handles.append(module.register_forward_pre_hook(partial(look, name), with_kwargs=True))
        elif isinstance(weight, nn.Parameter) and weight.ndim == 1 and not list(module.children()):
            handles.append(module.register_forward_hook(partial(note, name)))
    try:
        ids = torch.arange(TOKENS, device=network.get_input_embeddings().weight.device)[None]
        with evaluating(network):
            network(input_ids=ids % network.config.get_text_config().vocab_size, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return readers
