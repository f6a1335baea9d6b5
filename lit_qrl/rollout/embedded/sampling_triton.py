"""Triton kernels that draw a token of each row by inverting the cumulative distribution, in two passes over logits.

A first pass has the mass of each part of the vocabulary, from which a second finds the part that a token lies in, and
in that part the token: no running sum over all words is written down. Sums have one order for each row, whatever
stands beside it. Import it only where Triton and a CUDA device are.
"""

# Kernels are compiled from their source and launched with arguments that their Python signature does not have.
# pyright: reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from lit_qrl.functional._launch import remembered

PART = 2048
"""Words that a program reads."""


@triton.jit
def _scores(logits, row, part, words, row_stride, temperature, SIZE: tl.constexpr):
    at = part * SIZE + tl.arange(0, SIZE)
    return tl.load(logits + row * row_stride + at, mask=at < words, other=float("-inf")).to(tl.float32) / temperature


@triton.jit
def _mass(scores, top):
    return tl.where(scores == float("-inf"), 0.0, tl.exp(scores - top))


@remembered
@triton.jit
def _part_kernel(logits, tops, masses, words, row_stride, temperature, SIZE: tl.constexpr):
    """The largest score of a part, and the sum of its words' masses, of which that one has 1."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    scores = _scores(logits, row, part, words, row_stride, temperature, SIZE)
    top = tl.max(scores, axis=0)
    place = row * tl.num_programs(1) + part
    tl.store(tops + place, top)
    tl.store(masses + place, tl.sum(_mass(scores, top), axis=0))


@remembered
@triton.jit
def _draw_kernel(
    logits, tops, masses, uniform, tokens, logprobs, words, row_stride, count, temperature, PARTS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """One row: the first word up to which there is more mass than u of all; words without mass are never drawn."""
    row, number = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    there = number < count
    part_top = tl.load(tops + row * count + number, mask=there, other=float("-inf"))
    top = tl.max(part_top, axis=0)
    mass = tl.load(masses + row * count + number, mask=there, other=0.0) * _mass(part_top, top)
    sums = tl.cumsum(mass, axis=0)
    total = tl.max(sums, axis=0)
    threshold = tl.load(uniform + row) * total
    part = tl.minimum(tl.sum((sums <= threshold).to(tl.int32), axis=0), tl.max(tl.where(mass > 0, number, 0), axis=0))
    before = tl.sum(tl.where(number == part - 1, sums, 0.0), axis=0)
    scores, at = _scores(logits, row, part, words, row_stride, temperature, SIZE), tl.arange(0, SIZE)
    mass = _mass(scores, top)
    sums = before + tl.cumsum(mass, axis=0)
    # a part's mass is summed in another order here: rounding never passes its last word
    word = tl.minimum(tl.sum((sums <= threshold).to(tl.int32), axis=0), tl.max(tl.where(mass > 0, at, 0), axis=0))
    tl.store(tokens + row, (part * SIZE + word).to(tl.int64))
    tl.store(logprobs + row, tl.sum(tl.where(at == word, scores, 0.0), axis=0) - top - tl.log(total))


def draw(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return tokens " b" and their fp32 log-probs " b" under softmax(logits / temperature).

    Args:
        logits: "b v", the last dimension contiguous.
        uniform: " b", fp32 in [0, 1): the share of the mass that lies below the drawn word.
        temperature: positive.
    """
    b, words = logits.shape
    count = triton.cdiv(words, PART)
    tops, masses = torch.empty(2, b, count, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(b, dtype=torch.long, device=logits.device)
    logprobs = torch.empty(b, dtype=torch.float32, device=logits.device)
    sizes = words, logits.stride(0)
    _part_kernel[(b, count)](logits, tops, masses, *sizes, temperature, PART, num_warps=4)
    _draw_kernel[(b,)](
        logits, tops, masses, uniform.contiguous(), tokens, logprobs, *sizes, count, temperature,
        triton.next_power_of_2(count), PART, num_warps=4,
    )  # fmt: skip
    return tokens, logprobs
