"""What the learner computes by vLLM's kernels, so that no bit depends on the rows or tokens beside it.

FlashAttention 3 with the keys in one piece, and a persistent Triton GEMM for plain weights. They are those of vLLM 0.26
on a GPU of compute capability 9.0; vLLM is imported in functions only.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lit_qrl.formats.kernels.gemm import MANY

PADDED = 64
"""Words to whose multiples vLLM pads its logits: where a row begins decides how Triton loads it, and so adds it up."""
WHOLE_TILES = (64, 128, 256)
"""Head dimensions whose tiles are the same whether or not keys lie in pages."""


class _FlashAttention(torch.autograd.Function):
    """vLLM's forward pass, which has none back; torch's takes what it leaves: output and log of its sums."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, version: int) -> Tensor:
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        b, n, heads, _ = query.shape
        starts = torch.arange(0, (b + 1) * n, n, dtype=torch.int32, device=query.device)
        q, k, v = (one.reshape(b * n, *one.shape[2:]) for one in (query, key, value))
        places: dict[str, Any] = {"cu_seqlens_k": starts}
        if query.shape[-1] not in WHOLE_TILES:  # as the engine has them: in pages, here of one token
            pages = torch.arange(b * n, dtype=torch.int32, device=query.device).view(b, n)
            places = {"block_table": pages, "seqused_k": torch.full_like(starts[1:], n)}
            k, v = k[:, None], v[:, None]
        found: Any = flash_attn_varlen_func(
            q,
            k,
            v,
            max_seqlen_q=max(n, MANY),
            cu_seqlens_q=starts,
            max_seqlen_k=n,
            **places,
            softmax_scale=scale,
            causal=True,
            num_splits=1,
            fa_version=version,
            return_softmax_lse=True,
        )
        out = found[0].view(query.shape)
        sums = found[1].view(heads, b, n).transpose(0, 1).contiguous()
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        query, key, value, out, sums = ctx.saved_tensors
        n, nothing = query.shape[1], torch.zeros(2, dtype=torch.uint64, device=query.device)
        found = torch.ops.aten._flash_attention_backward(
            grads[0].contiguous(), query, key, value, out, sums, None, None, n, n, 0.0, True, nothing, nothing[:1],
            scale=ctx.scale,
        )  # fmt: skip
        return *found, None, None


def flash_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None, version: int = 3) -> Tensor:
    """Return causal attention "b n heads d" by vLLM's FlashAttention, the keys of a query in one piece; with gradients.

    Args:
        query: "b n heads d", in bf16 or fp16.
        key: "b n key_heads d"; heads a multiple of key_heads.
        value: "b n key_heads d".
        scale: factor of the scores; None is 1/√d.
        version: of FlashAttention.
    """
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    return _FlashAttention.apply(query, key, value, factor, version)  # pyright: ignore[reportReturnType]


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x @ weight.T + bias`, "m in" -> "m out", by vLLM's Triton GEMM, which adds in one order for any m."""
    from vllm.model_executor.layers.batch_invariant import linear_batch_invariant

    return linear_batch_invariant(x, weight, bias)


def drawn_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Return the log-probs of tokens " m" under logits "m v", by the kernels of vLLM's second runner for drawn tokens.

    Args:
        logits: as the head made them; they stay.
        tokens: " m".
        temperature: of the draw, by which vLLM divides in the logits' own dtype.
    """
    from vllm.v1.worker.gpu.sample import gumbel, logprob

    words = logits.shape[1]
    if words % PADDED or temperature != 1.0:
        logits = F.pad(logits, (0, -words % PADDED))[:, :words]
    if temperature != 1.0:
        rows = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
        gumbel.apply_temperature(logits, rows, torch.full((1,), temperature, dtype=torch.float32, device=logits.device))
    return logprob.compute_token_logprobs(logits, tokens[:, None])[:, 0]
