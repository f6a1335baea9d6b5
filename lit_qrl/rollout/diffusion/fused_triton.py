"""Triton kernels of a denoising step: residual sum and RMS norm in one, and drawing of words.

Import it only where Triton and a CUDA device are. Results are rounded where the modules of transformers round; a norm's
mean is summed in another order, which changes its last bit at times.
"""

# Kernels are compiled from their source and launched with arguments that their Python signature does not have.
# pyright: reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST = 16384
"""The widest row that a program of the norm holds."""


@triton.jit
def _norm_kernel(x, residual, weight, y, k, eps, ADD: tl.constexpr, SIZE: tl.constexpr):
    """One row: the sum goes to where the residual stood."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    inside = column < k
    at = row * k + column
    dtype: tl.constexpr = x.dtype.element_ty
    wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        total = (wide + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        tl.store(residual + at, total, mask=inside)
        wide = total.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / k + eps)
    scaled = (wide * inverse).to(dtype).to(tl.float32)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, (gain * scaled).to(dtype), mask=inside)


def norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Return `weight · h / sqrt(mean h² + ε)` of h = x + residual, "... k"; h is written over the residual.

    Args:
        x: "... k", contiguous.
        residual: "... k", contiguous; None stands for zeros, and nothing is written.
        weight: " k".
        eps: ε.
    """
    k = x.shape[-1]
    y = torch.empty_like(x)
    size = triton.next_power_of_2(k)
    rows, warps = x.numel() // k, min(max(size // 512, 1), 16)
    _norm_kernel[(rows,)](
        x, x if residual is None else residual, weight, y, k, eps, residual is not None, size, num_warps=warps
    )
    return y


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
