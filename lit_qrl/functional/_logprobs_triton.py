"""Triton kernels for `logprobs`: 16-bit logits are read once for their log-probs, and become their gradient in place.

Import it only where Triton and a CUDA device are. The plain operations go over the fp32 logits about twelve times.
"""

# Kernels are compiled from their source and launched with arguments that their Python signature does not have.
# pyright: reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from lit_qrl.functional._launch import remembered

SIZE, WARPS = 4096, 8
"""Logits that a program takes at a time, and its warps."""


@remembered
@triton.jit
def _reduce_kernel(logits, tokens, normalizer, chosen, spread, words, factor, SIZE: tl.constexpr, SPREAD: tl.constexpr):
    """One row: log Σ e^z, the z of its token, and the entropy, with z = factor · logit in fp32."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, SIZE)
    # Each lane sums on its own, from its own largest value; they meet at the end. So does
    # Σ e^(z − top) (z − top), in which nothing large cancels.
    top = tl.full((SIZE,), float("-inf"), tl.float32)
    total = tl.zeros((SIZE,), tl.float32)
    weighted = tl.zeros((SIZE,), tl.float32)
    for start in range(0, words, SIZE):
        word = start + place
        z = tl.load(logits + row * words + word, mask=word < words, other=float("-inf")).to(tl.float32) * factor
        higher = tl.maximum(top, z)
        # A logit of -inf adds nothing: its share is 0, and 0 · -inf is not asked for.
        shrink = tl.where(top == float("-inf"), 0.0, tl.exp(top - higher))
        share = tl.where(z == float("-inf"), 0.0, tl.exp(z - higher))
        if SPREAD:
            weighted = (weighted + tl.where(total == 0.0, 0.0, total * (top - higher))) * shrink
            weighted += tl.where(z == float("-inf"), 0.0, share * (z - higher))
        total = total * shrink + share
        top = higher
    highest = tl.max(top, axis=0)
    shrink = tl.where(top == float("-inf"), 0.0, tl.exp(top - highest))
    whole = tl.sum(total * shrink, axis=0)
    tl.store(normalizer + row, highest + tl.log(whole))
    if SPREAD:
        weighted = (weighted + tl.where(total == 0.0, 0.0, total * (top - highest))) * shrink
        tl.store(spread + row, tl.log(whole) - tl.sum(weighted, axis=0) / whole)
    token = tl.load(tokens + row)
    tl.store(chosen + row, tl.load(logits + row * words + token).to(tl.float32) * factor)


@remembered
@triton.jit
def _gradient_kernel(logits, tokens, normalizer, upstream, words, factor, SIZE: tl.constexpr):
    """Rows of logits become (onehot(y) − π) · upstream, rounded to their own dtype."""
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = word < words
    at = logits + row * words + word
    z = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32) * factor
    share = tl.exp(z - tl.load(normalizer + row))
    step = tl.load(upstream + row)
    hit = tl.where(word == tl.load(tokens + row), step, 0.0)
    tl.store(at, (hit - share * step).to(logits.dtype.element_ty), mask=inside)


def reduced(logits: Tensor, tokens: Tensor, factor: float, entropy: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return log Σ e^z, the z of each row's token and, where asked for, the entropy of softmax(z), " n" each in fp32.

    Args:
        logits: "n v", contiguous, of 16 bits.
        tokens: " n", int64.
        factor: z = factor · logit.
        entropy: whether it is wanted, nats.
    """
    n, words = logits.shape
    normalizer, chosen, spread = (torch.empty(n, dtype=torch.float32, device=logits.device) for _ in range(3))
    _reduce_kernel[(n,)](logits, tokens, normalizer, chosen, spread, words, factor, SIZE, entropy, num_warps=WARPS)
    return normalizer, chosen, spread if entropy else None


def to_gradient(logits: Tensor, tokens: Tensor, normalizer: Tensor, upstream: Tensor, factor: float) -> None:
    """Turn logits "n v" in place into the gradient of Σ upstream · log π(token) by z = factor · logit.

    Args:
        logits: "n v", contiguous, of 16 bits.
        tokens: " n", int64.
        normalizer: " n" of `reduced`.
        upstream: " n", fp32.
        factor: z = factor · logit.
    """
    n, words = logits.shape
    grid = n, triton.cdiv(words, SIZE)
    _gradient_kernel[grid](logits, tokens, normalizer, upstream, words, factor, SIZE, num_warps=WARPS)
