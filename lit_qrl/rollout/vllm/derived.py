"""Tensors that vLLM makes of weights: latent attention multiplies by pieces of `kv_b_proj` of its own, a state decays.

No checkpoint has the former, so that no receipt can be taken. vLLM makes them after every reload; a load along routes
must have them made again, and what they hold is compared with the layer that they are made of. Of the latter the
checkpoint has the logarithm: a loader computes −exp(A) as it comes.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lit_qrl.receipts.ledger import Fault, share_of_bound
from lit_qrl.rollout.vllm.locations import Place, restored_names

COLUMNS = 8
"""Columns of the latent space in which a derived tensor is compared with its source, spread over all."""


def names(module: nn.Module) -> set[str]:
    """Return the module's parameters that vLLM's own processing of attention made; no loader ever fills them."""
    if not callable(getattr(module, "process_weights_after_loading", None)):
        return set()
    made = {name for name, tensor in module._parameters.items() if tensor is not None}
    return made - restored_names(module) if made else set()


@torch.no_grad()
def make_again(llm: Any, modules: Mapping[str, nn.Module]) -> None:
    """Have vLLM make them of the weights that are there now, in the memory that captured CUDA graphs read."""
    from vllm.config import set_current_vllm_config

    config = llm.llm_engine.vllm_config
    with set_current_vllm_config(config):
        for module in modules.values():
            module.process_weights_after_loading(config.model_config.dtype)  # pyright: ignore[reportCallIssue]


@torch.no_grad()
def stale(
    modules: Mapping[str, nn.Module], columns_of: Callable[[nn.Module, Sequence[int]], Tensor | None]
) -> list[Fault]:
    """Return a fault for each piece of a latent attention that differs from the layer that it is made of.

    Args:
        modules: by name, with tensors that vLLM derived.
        columns_of: from a linear module and column indices to those columns ("out columns") as its GEMM sees them.
    """
    wrong: list[tuple[str, Tensor]] = []
    for name, module in modules.items():
        source: Any = getattr(module, "kv_b_proj", None)
        source = getattr(source, "base_layer", source)  # of an adapter's wrapper
        keys, values = (getattr(module, piece, None) for piece in ("W_UK_T", "W_UV"))
        if source is None or keys is None or values is None:
            continue
        heads, inner, latent = keys.shape
        step = max(latent // COLUMNS, 1)
        chosen = list(range(0, latent, step))[:COLUMNS]
        columns = columns_of(source, chosen)
        if columns is None:
            continue
        exact = type(getattr(source, "quant_method", None)).__name__.startswith("Unquantized")
        weight = columns.reshape(heads, -1, len(chosen)).float()
        for piece, held, expected in (
            ("W_UK_T", keys[:, :, chosen], weight[:, :inner]),
            ("W_UV", values[:, chosen].transpose(1, 2), weight[:, inner:]),
        ):
            share = share_of_bound(held.reshape(-1, len(chosen)), expected.reshape(-1, len(chosen)), exact)
            wrong.append((f"{name}.{piece}", (share > 1).any()))
    found = torch.stack([flag for _, flag in wrong]).tolist() if wrong else []
    return [Fault("derived", name) for (name, _), flag in zip(wrong, found, strict=True) if flag]


def computing_loader(parameter: Any) -> Callable[[Tensor, Tensor], None] | None:
    """Return the loader of a parameter that computes what it keeps of what it gets; None where it keeps that itself."""
    loader = getattr(parameter, "weight_loader", None)
    inner = None if loader is None else inspect.unwrap(loader)
    return inner if "composed" in getattr(inner, "__qualname__", "") else None


def note(sent: dict[str, tuple[Place, Tensor]], name: str, place: Place, tensor: Tensor) -> bool:
    """Keep what comes for a parameter whose loader computes what it keeps; return False for any other.

    Args:
        sent: where it is kept, for `other`.
        name: in the checkpoint.
        place: of the tensor.
        tensor: that comes.
    """
    if computing_loader(getattr(place.module, place.attribute, None)) is None:
        return False
    sent[name] = place, tensor.clone()
    return True


@torch.no_grad()
def other(sent: dict[str, tuple[Place, Tensor]]) -> list[Fault]:
    """Return a fault for each parameter that is not what its loader makes of what was sent, and forget that.

    Args:
        sent: place and tensor by name, as `note` kept them.
    """
    wrong: list[tuple[str, Tensor]] = []
    for name, (place, tensor) in sent.items():
        held: Any = getattr(place.module, place.attribute)
        made, load = torch.empty_like(held.data), computing_loader(held)
        if load is not None:
            load(made, tensor.to(made.device))
            wrong.append((name, (made != held).any()))
    sent.clear()
    found = torch.stack([flag for _, flag in wrong]).tolist() if wrong else []
    return [Fault("derived", name) for (name, _), flag in zip(wrong, found, strict=True) if flag]
