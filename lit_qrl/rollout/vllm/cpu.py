"""The CPU build of vLLM: which of its operators are there, and workarounds for it alone.

Nothing here imports vLLM before an engine is validated with a format that needs its operators, or built.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

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


def apply_workarounds() -> None:
    """Patch the CPU build, once per process, where a sampler needs more than it has."""
    _quantize_activations()
    _score_under_adapters()


def _quantize_activations() -> None:
    """Provide the FP8 quantization of activations that the CPU build lacks, in plain torch."""
    import vllm._custom_ops as ops

    if hasattr(ops.scaled_fp8_quant, "in_torch"):
        return

    def scaled_fp8_quant(
        input: Tensor,
        scale: Tensor | None = None,
        num_token_padding: int | None = None,
        scale_ub: Tensor | None = None,
        use_per_token_if_dynamic: bool = False,
        output: Tensor | None = None,
        group_shape: Any = None,
    ) -> tuple[Tensor, Tensor]:
        limit = torch.finfo(torch.float8_e4m3fn).max
        x = input.float()
        if scale is None:
            amax = x.abs().amax(dim=-1, keepdim=True) if use_per_token_if_dynamic else x.abs().amax().reshape(1)
            scale = (amax / limit).clamp_min(torch.finfo(torch.float32).tiny)
        assert scale is not None
        factor = scale.float()
        if factor.ndim == 2 and factor.numel() > 1:
            factor = factor.repeat_interleave(x.shape[0] // factor.shape[0], dim=0)
            factor = factor.repeat_interleave(x.shape[1] // factor.shape[1], dim=1)
        codes = (x / factor).clamp(-limit, limit).to(torch.float8_e4m3fn)
        return (codes if output is None else output.copy_(codes)), scale

    scaled_fp8_quant.in_torch = True  # pyright: ignore[reportFunctionMemberAccess]
    ops.scaled_fp8_quant = scaled_fp8_quant


def _score_under_adapters() -> None:
    """Let several sequences be scored under an adapter.

    The wrapper of the output head looks adapters up by sequence, but log-probs of a prompt ask for one row per token.
    """
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    original = PunicaWrapperCPU.add_lora_logits
    if hasattr(original, "by_token"):
        return

    def add_lora_logits(wrapper: Any, y: Tensor, x: Tensor, *args: Any, **options: Any) -> None:
        rows, by_sequence = x.reshape(-1, x.shape[-1]).shape[0], wrapper.sampler_indices
        if rows == by_sequence.numel():
            original(wrapper, y, x, *args, **options)
            return
        # An engine of ours has one adapter, so all sequences of a batch have the same.
        kept, count = by_sequence.clone(), wrapper.indices_len[1]
        wrapper._sampler_indices[:rows], wrapper.indices_len[1] = kept[0], rows
        try:
            original(wrapper, y, x, *args, **options)
        finally:
            wrapper._sampler_indices[: kept.numel()], wrapper.indices_len[1] = kept, count

    add_lora_logits.by_token = True  # pyright: ignore[reportFunctionMemberAccess]
    PunicaWrapperCPU.add_lora_logits = add_lora_logits  # pyright: ignore[reportAttributeAccessIssue]


def whole_prefills(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the engine's arguments with every prompt prefilled in one piece.

    After a piece of a prefill vLLM rewinds the request's random generator, which a generator on CPU cannot do: a
    seeded request would end the engine.
    """
    budget = max(arguments["max_model_len"], CPU_PREFILL_TOKENS)
    return {"enable_chunked_prefill": False, "max_num_batched_tokens": budget, **arguments}
