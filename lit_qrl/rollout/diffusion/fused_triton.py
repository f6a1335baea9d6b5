"""Triton kernels of a denoising step: drawing of words.

Import it only where Triton and a CUDA device are.
"""

# Kernels are compiled from their source and launched with arguments that their Python signature does not have.
# pyright: reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096
"""Words of one program that draws."""


@triton.jit
def _scores_kernel(
    logits, uniform, masked, temperature, best, place, highest, total, v, mask_token, GREEDY: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Of some words at one position: the largest score under noise and its word, the largest logit, and the sum."""
    position, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(masked + position) != 0:
        word = chunk * SIZE + tl.arange(0, SIZE)
        inside = (word < v) & (word != mask_token)
        z = tl.load(logits + position * v + word, mask=inside, other=float("-inf")).to(tl.float32)
        score = z.to(tl.float64)
        if not GREEDY:
            u = tl.load(uniform + position * v + word, mask=inside, other=0.5)
            score = score + tl.load(temperature) * -tl.log(-tl.log(u))
        most, at = tl.max(score, axis=0, return_indices=True)
        top = tl.max(z, axis=0)
        floor = tl.where(top == float("-inf"), 0.0, top)
        to = position * tl.num_programs(1) + chunk
        tl.store(best + to, most)
        tl.store(place + to, (chunk * SIZE + at).to(tl.int64))
        tl.store(highest + to, top)
        tl.store(total + to, tl.sum(tl.exp(z - floor), axis=0))


@triton.jit
def _drawn_kernel(
    logits, masked, best, place, highest, total, tokens, sure, v, chunks, CHUNKS: tl.constexpr
):  # fmt: skip
    """The word of one position, and its probability."""
    position = tl.program_id(0).to(tl.int64)
    if tl.load(masked + position) != 0:
        chunk = tl.arange(0, CHUNKS)
        inside, at = chunk < chunks, position * chunks + chunk
        score = tl.load(best + at, mask=inside, other=float("-inf"))
        _, first = tl.max(score, axis=0, return_indices=True)
        token = tl.load(place + position * chunks + first)
        top = tl.load(highest + at, mask=inside, other=float("-inf"))
        most = tl.max(top, axis=0)
        parts = tl.load(total + at, mask=inside, other=0.0) * tl.exp(top - most)
        z = tl.load(logits + position * v + token).to(tl.float32)
        tl.store(tokens + position, token)
        tl.store(sure + position, tl.exp(z - (most + tl.log(tl.sum(parts, axis=0)))))


def draw(
    logits: Tensor, uniform: Tensor | None, masked: Tensor, temperature: Tensor, mask_token: int
) -> tuple[Tensor, Tensor]:
    """Return the tokens and confidences "b t" of `gumbel_argmax` and `confidence` where `masked`, and zeros elsewhere.

    Args:
        logits: "b t v", contiguous.
        uniform: "b t v", fp64, contiguous; None is greedy.
        masked: "b t", bool, contiguous.
        temperature: one fp64 number.
        mask_token: a word that is never drawn and has no probability.
    """
    v = logits.shape[-1]
    chunks, positions, device = triton.cdiv(v, CHUNK), masked.numel(), logits.device
    best = torch.empty(positions, chunks, dtype=torch.float64, device=device)
    place = torch.empty(positions, chunks, dtype=torch.int64, device=device)
    highest, total = torch.empty(2, positions, chunks, dtype=torch.float32, device=device)
    tokens = torch.zeros(masked.shape, dtype=torch.int64, device=device)
    sure = torch.zeros(masked.shape, dtype=torch.float32, device=device)
    flags, greedy = masked.view(torch.uint8), uniform is None
    _scores_kernel[(positions, chunks)](
        logits, temperature if uniform is None else uniform, flags, temperature, best, place, highest, total, v,
        mask_token, greedy, CHUNK, num_warps=8,
    )  # fmt: skip
    _drawn_kernel[(positions,)](
        logits, flags, best, place, highest, total, tokens, sure, v, chunks, triton.next_power_of_2(chunks),
        num_warps=1,
    )  # fmt: skip
    return tokens, sure
