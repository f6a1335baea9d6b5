"""The arguments with which vLLM is started: what the run needs, and over it what the user gave."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from lit_qrl.errors import ConfigError
from lit_qrl.rollout.engine import SamplerSpec
from lit_qrl.rollout.vllm import cpu
from lit_qrl.rollout.vllm.adapter import adapted_layers
from lit_qrl.rollout.vllm.cache_size import sufficient_cache
from lit_qrl.rollout.vllm.models import latent, recurrent
from lit_qrl.rollout.vllm.patches import ALL
from lit_qrl.rollout.vllm.start import compilation

LOOKED_UP = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
"""How many of the last tokens must have come before for what followed them to be proposed, and the most looked for."""

SIZES_OF_CACHE = {"kv_cache_memory_bytes", "num_gpu_blocks_override"}
"""Arguments of `vllm.LLM` by which a user sizes the cache himself."""


def proposals(tokens: int) -> dict[str, Any]:
    """Return vLLM's argument for proposing tokens by looking up the last ones earlier in the sequence.

    Args:
        tokens: proposed at a time; 0 proposes none.

    Raises:
        ConfigError: for a negative number.

    >>> proposals(0), proposals(3)["speculative_config"]["num_speculative_tokens"]
    ({}, 3)
    """
    if tokens < 0:
        raise ConfigError(
            "data.engine.speculative is negative.", expected="a number of tokens, or 0 for none", given=tokens
        )
    return {"speculative_config": {"method": "ngram", "num_speculative_tokens": tokens, **LOOKED_UP}} if tokens else {}


def first_runner(given: Mapping[str, Any], spec: SamplerSpec) -> bool:
    """Return whether vLLM's first model runner is needed: the second's masks and its rejection were not verified.

    Args:
        given: arguments of `vllm.LLM`.
        spec: of the run's sampler.
    """
    return spec.kept or bool(given.get("speculative_config"))


def llm_arguments(
    spec: SamplerSpec,
    network: nn.Module,
    place: Path,
    dtype: torch.dtype,
    longest: int,
    given: Mapping[str, Any],
    *,
    quick_start: bool | Literal["auto"] = "auto",
    kv_cache_gib: float | None = None,
    max_lora_rank: int = 0,
    sleep_level: int = 0,
    parts: int = 1,
) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`.

    Args:
        spec: of the run's sampler.
        network: the learner's model.
        place: folder of the config that vLLM reads.
        dtype: of activations and plain tensors.
        longest: sequence, in tokens.
        given: arguments of the user's, which go before what is usual here.
        quick_start: as of `VLLMEngine`, and so the rest.
        kv_cache_gib: size of the KV cache; None is what all sequences fill at once, where there is room for it.
        max_lora_rank: of adapters apart from their base; 0 for none.
        sleep_level: what a sleep does.
        parts: processes that the engine consists of.
    """
    on_gpu = torch.cuda.is_available()
    arguments: dict[str, Any] = {
        "model": str(place),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": dtype,
        "max_model_len": longest,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        **compilation(quick_start, spec.decode_steps),
        **given,
    }
    if not on_gpu:
        arguments = cpu.whole_prefills(arguments, recurrent(type(network).__name__))
        if latent(network.config):
            arguments = cpu.reference_attention(arguments)
    if kv_cache_gib is not None and on_gpu:
        arguments.setdefault("kv_cache_memory_bytes", int(kv_cache_gib * 2**30))
    elif on_gpu and not SIZES_OF_CACHE & given.keys():
        enough = sufficient_cache(network, longest, dtype, spec.format, given, parts)
        arguments |= {} if enough is None else {"kv_cache_memory_bytes": enough}
    if max_lora_rank:
        arguments.update(enable_lora=True, max_loras=1, max_lora_rank=max_lora_rank)
        arguments.setdefault("lora_target_modules", adapted_layers(network, spec.adapter))
    if spec.kept:
        arguments["max_logprobs"] = ALL
    if spec.in_flight != "none":  # between two steps nothing may be under way
        arguments["async_scheduling"] = False
    if sleep_level and on_gpu:
        arguments["enable_sleep_mode"] = True
    if spec.routes and on_gpu:
        arguments["enable_return_routed_experts"] = True
    return arguments
