"""A LoRA adapter in a live vLLM engine, replaced in the memory that its kernels read."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lit_qrl.errors import ConfigError
from lit_qrl.receipts.ledger import ReceivedLedger, RefusedError
from lit_qrl.rollout.adapter import PREFIX, A, B, factors, scaling
from lit_qrl.rollout.vllm.checks import LORA_RANKS
from lit_qrl.rollout.vllm.live_model import LiveModel

ADAPTER_ID = 1


def request() -> Any:
    """Return vLLM's request for the one adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", ADAPTER_ID, "in-memory")


def check_adapter(config: Any, max_rank: int) -> None:
    """Raise `ConfigError` for an adapter that the engine cannot hold apart from its base.

    Args:
        config: the policy's PEFT config.
        max_rank: the engine's limit, 0 without room for any.
    """
    if config.r > max_rank:
        fits = next((rank for rank in LORA_RANKS if rank >= config.r), config.r)
        raise ConfigError(
            "The policy's LoRA rank is above the engine's limit.",
            expected=f"data.engine.max_lora_rank of at least {config.r}",
            given=max_rank,
            remedy=f"Set it to {fits}, or set publisher.lora to merged.",
        )
    if unsupported := [what for what in ("alpha_pattern", "rank_pattern") if getattr(config, what, None)]:
        raise ConfigError(
            f"vLLM cannot hold an adapter with {', '.join(unsupported)} apart from its base.",
            remedy="Drop the option, or set publisher.lora to merged.",
        )


def adapted_layers(network: nn.Module, config: Any) -> list[str] | None:
    """Return the last parts of the names of the layers that an adapter changes; None where they are not known.

    vLLM gives no other layer room for an adapter. Else the embedding and the output head would have some too, which
    costs a pass over the vocabulary at every token, and fails for a tied head of fewer tokens than the hidden size.

    Args:
        network: the learner's, with or without the adapter.
        config: its PEFT config, where it stands beside its base.
    """
    named = [(name.rpartition(".")[2], module) for name, module in network.named_modules()]
    layers = {leaf for leaf, module in named if hasattr(module, "lora_A")}
    chosen = getattr(config, "target_modules", None)
    if not layers and isinstance(chosen, list | set | tuple):
        layers = {name.rpartition(".")[2] for name in chosen}
    return sorted(layers) or None


@torch.no_grad()
def replace_adapter(
    live: LiveModel, manager: Any, config: Any, tensors: Iterator[tuple[str, Tensor]], ledger: ReceivedLedger
) -> None:
    """Replace the one adapter of an engine, and write into `ledger` what its buffers hold.

    Args:
        live: the engine's model.
        manager: of adapters, which the worker has.
        config: the policy's PEFT config.
        tensors: under PEFT's names.
        ledger: of the engine.

    Raises:
        PublishError: when one of a layer's two factors is missing; the old adapter stays.
        RefusedError: for a tensor that is no factor of a layer that the engine adapts.
    """
    given, held = factors(tensors, ledger), manager._adapter_manager
    if ADAPTER_ID not in held.lora_index_to_id:  # at first, or a reload has dropped it
        manager.add_dummy_lora(request(), config.r)  # of zeros, in a running engine: vLLM reads one from files alone
        held.activate_adapter(ADAPTER_ID)
    slot = list(held.lora_index_to_id).index(ADAPTER_ID)
    for layer, (a, b) in given.items():
        place = live.locate_layer(layer)
        wrapper = None if place is None else held.modules.get(place.module_name)
        if place is None or wrapper is None:
            raise RefusedError(
                f"The engine adapts no layer {layer}. Expected: one of the model's linear layers. "
                f"Restrict lora.target_modules to those, or set publisher.lora to merged."
            )
        into_a, into_b = wrapper.lora_a_stacked[place.part][slot, 0], wrapper.lora_b_stacked[place.part][slot, 0]
        into_a.zero_()
        into_b.zero_()
        live_a, live_b = into_a[: a.shape[0], : a.shape[1]], into_b[: b.shape[0], : b.shape[1]]
        scaled = b.to(into_b.device, into_b.dtype) * scaling(config, layer, a.shape[0])
        live_a.copy_(a)
        live_b.copy_(scaled)
        ledger.record(PREFIX + layer + A, live_a)
        # The buffer holds B times the scaling, which cannot always be undone exactly; B itself is what was sent.
        same = (live_b == scaled).all()
        ledger.record(PREFIX + layer + B, torch.where(same, b.to(live_b.device), live_b.to(b.dtype)))
