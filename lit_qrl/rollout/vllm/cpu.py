"""The CPU build of vLLM: which of its operators are there, and what an engine on it is started with.

Nothing here imports vLLM before an engine is validated with a format that needs its operators, or built.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch

# Tokens of one prefill batch on CPU, where larger ones gain nothing.
CPU_PREFILL_TOKENS = 2048


def missing_operators(needed: Iterable[str]) -> list[str]:
    """Return those of the operators that the build which vLLM loaded on this host does not have."""
    needed = list(needed)
    if needed:
        import vllm._custom_ops  # noqa: F401  loads the library of vLLM's choice
    return [name for name in needed if not hasattr(torch.ops._C, name)]


@lru_cache
def int8_product() -> tuple[float, float]:
    """Return (got, exact) of one product of vLLM's INT8 GEMM, which loses digits on a CPU without VNNI instructions.

    oneDNN then adds pairs of products in 16 bits, which two products of the largest codes exceed.
    """
    import vllm._custom_ops as ops

    inputs, outputs, largest = 64, 32, 127
    codes, scales = torch.full((outputs, inputs), largest, dtype=torch.int8), torch.ones(outputs, 1)
    handle = ops.create_onednn_scaled_mm(codes.t(), scales, torch.float32, True, False, 32)
    rows, scale, _ = ops.onednn_scaled_int8_quant(torch.full((1, inputs), float(largest)), None, None, True)
    out = torch.empty(1, outputs)
    ops.onednn_scaled_mm(handle, rows, out, scale, None, None, None)
    exact = float(inputs * largest**2)
    return float(out[0, (out - exact).abs().argmax()]), exact


def whole_prefills(arguments: dict[str, Any], recurrent: bool = False) -> dict[str, Any]:
    """Return the engine's arguments with every prompt prefilled in one piece.

    After a piece of a prefill vLLM rewinds the request's random generator, which a generator on CPU cannot do: a
    seeded request would end the engine.

    Args:
        arguments: of `vllm.LLM`.
        recurrent: True for a model with a state, of which vLLM keeps prefixes only where it prefills in pieces.
    """
    budget = max(arguments["max_model_len"], CPU_PREFILL_TOKENS)
    whole = {"enable_chunked_prefill": False, "max_num_batched_tokens": budget, **arguments}
    return {**whole, "enable_prefix_caching": False} if recurrent and not whole["enable_chunked_prefill"] else whole
