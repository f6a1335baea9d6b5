"""The arguments with which vLLM is started: what a run needs, the size of its cache, and over it what the user gave."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lit_qrl.formats.base import NumberFormat
from lit_qrl.network.structure import cached_numbers, states
from lit_qrl.rollout.vllm import cpu
from lit_qrl.rollout.vllm.adapter import adapted_layers
from lit_qrl.rollout.vllm.models import latent, recurrent
from lit_qrl.rollout.vllm.patches import ALL
from lit_qrl.rollout.vllm.process import compilation

TRANSFER = "lit_qrl"
"""The name of the weight transfer by which all weights come."""
EXTENSION = "lit_qrl.rollout.vllm.worker.WorkerExtension"

SIZES_OF_CACHE = {"kv_cache_memory_bytes", "num_gpu_blocks_override"}
"""Arguments of `vllm.LLM` by which a user sizes the cache himself."""


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return the arguments of `vllm.LLM` as those of `vllm serve`, with what makes its server take a run's weights.

    >>> flags({"model": "folder", "dtype": torch.bfloat16, "seed": 0, "enable_prefix_caching": False})[:4]
    ['--dtype', 'bfloat16', '--seed', '0']
    """
    found: list[str] = []
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        if name in ("model", "disable_log_stats") or value is None:
            continue  # the first comes without a name; without the second there are no metrics
        if isinstance(value, bool):
            found += [flag if value else f"--no-{flag[2:]}"]
        elif isinstance(value, list):
            found += [flag, *map(str, value)]
        else:
            text = json.dumps(value) if isinstance(value, dict) else str(value).removeprefix("torch.")
            found += [flag, text]
    found += ["--tokens-only", "--served-model-name", "policy"]
    return [*found, "--middleware", "lit_qrl.rollout.vllm.guard.KeyGuard"]


def llm_arguments(engine: Any, place: Path, dtype: torch.dtype, longest: int) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`.

    Args:
        engine: a `VLLMEngine` that knows sampler and model; what the user gave it goes before what is usual here.
        place: folder of the config that vLLM reads.
        dtype: of activations and plain tensors.
        longest: sequence, in tokens.
    """
    spec, network, given, on_gpu = engine.spec, engine.policy.network, engine._arguments, torch.cuda.is_available()
    arguments: dict[str, Any] = {
        "model": str(place),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": dtype,
        "max_model_len": longest,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "worker_extension_cls": EXTENSION,
        "weight_transfer_config": {"backend": TRANSFER},
        **compilation(True if engine.alike else engine.quick_start, spec.decode_steps),
        **given,
    }
    if not on_gpu:
        arguments = cpu.whole_prefills(arguments, recurrent(type(network).__name__))
        if latent(network.config):
            # Another, which it takes on a host with AMX, packs its pieces of `kv_b_proj` once, out of sight, and drops
            # that layer: a second publish would leave them as they are, and nothing could tell.
            arguments["attention_backend"] = "CPU_MLA"
    if engine.kv_cache_gib is not None and on_gpu:
        arguments.setdefault("kv_cache_memory_bytes", int(engine.kv_cache_gib * 2**30))
    elif on_gpu and not SIZES_OF_CACHE & given.keys():
        enough = sufficient_cache(network, longest, dtype, spec.format, given, engine.tensor_parallel_size)
        arguments |= {} if enough is None else {"kv_cache_memory_bytes": enough}
    if engine.max_lora_rank:
        arguments.update(enable_lora=True, max_loras=1, max_lora_rank=engine.max_lora_rank)
        arguments.setdefault("lora_target_modules", adapted_layers(network, spec.adapter))
    if spec.kept:
        arguments["max_logprobs"] = ALL
    if engine.sleep_level and on_gpu:
        arguments["enable_sleep_mode"] = True
    if spec.routes and on_gpu:
        arguments["enable_return_routed_experts"] = True
    return arguments


BLOCK = 128
"""Tokens that a sequence's place is rounded up to: as many as the largest block that vLLM's attention takes."""
USED = 0.9
"""Of the engine's share of a GPU's memory, for weights and cache; the rest is for activations and recorded graphs."""


def whole_cache(network: Any, longest: int, sequences: int, size: int, parts: int = 1) -> int:
    r"""Return the bytes of all sequences' keys and values at once, 0 where layers keep something else.

    $b s (128 \lceil n / 128 \rceil + 128) \cdot c / p$ for $c$ numbers of $b$ bytes a token.

    Args:
        network: a causal language model, whose weights need not be there.
        longest: $n$, tokens of the longest sequence.
        sequences: $s$ decoded at a time.
        size: $b$, bytes of a number.
        parts: $p$, processes that the heads are dealt to.

    >>> from lit_qrl.network.structure import outline
    >>> from transformers import Qwen2Config
    >>> config = Qwen2Config(hidden_size=1536, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2)
    >>> round(whole_cache(outline(config), longest=721, sequences=256, size=2) / 2**30, 2)
    6.12
    """
    kinds = set(getattr(network.config.get_text_config(), "layer_types", None) or ["full_attention"])
    if states(network) or kinds != {"full_attention"}:
        return 0
    tokens = (math.ceil(longest / BLOCK) + 1) * BLOCK
    return math.ceil(cached_numbers(network.config) / parts) * size * sequences * tokens


def sufficient_cache(
    network: Any,
    longest: int,
    dtype: torch.dtype,
    format: NumberFormat | None,
    given: Mapping[str, Any],
    parts: int = 1,
) -> int | None:
    """Return the bytes of a KV cache that no rollout outgrows; None where the engine's share has no room for it.

    It is None, too, where what a sequence takes is not known.

    Args:
        network: the learner's model.
        longest: sequence, in tokens.
        dtype: of what is not quantized.
        format: of the sampler's layers.
        given: arguments of `vllm.LLM`, of which its share of the memory and its sequences count.
        parts: processes that the engine consists of.
    """
    whole = whole_cache(network, longest, given["max_num_seqs"], dtype.itemsize, parts)
    bits = 8 * dtype.itemsize if format is None else format.bits_per_weight
    plain = sum(parameter.numel() for parameter in network.parameters()) * bits / 8 / parts
    weights = max(plain, torch.cuda.memory_allocated())  # packed ones are no parameters, but the learner holds them
    room = USED * given["gpu_memory_utilization"] * torch.cuda.mem_get_info()[1] - weights
    return whole if 0 < whole <= room else None
