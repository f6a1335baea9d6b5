"""How large a KV cache a run can fill: memory beyond that is of more use to the learner."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from lit_qrl.formats.base import NumberFormat
from lit_qrl.network.structure import cached_numbers, states
from lit_qrl.rollout.vllm.cache_scales import quantized

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
        given: arguments of `vllm.LLM`, of which its share of the memory, its sequences and the cache's dtype count.
        parts: processes that the engine consists of.
    """
    kind = given["kv_cache_dtype"]
    if kind != "auto" and not quantized(kind):
        return None
    whole = whole_cache(network, longest, given["max_num_seqs"], 1 if quantized(kind) else dtype.itemsize, parts)
    bits = 8 * dtype.itemsize if format is None else format.bits_per_weight
    plain = sum(parameter.numel() for parameter in network.parameters()) * bits / 8 / parts
    weights = max(plain, torch.cuda.memory_allocated())  # packed ones are no parameters, but the learner holds them
    room = USED * given["gpu_memory_utilization"] * torch.cuda.mem_get_info()[1] - weights
    return whole if 0 < whole <= room else None
