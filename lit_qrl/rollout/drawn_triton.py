"""Triton kernels that give the log-prob and the rank of each drawn token, from one pass over the scores.

    log p(y) = s_y − max s − ln Σ_w e^(s_w − max s),      rank(y) = the number of words with s_w ≥ s_y

A row's words are cut into parts, which programs of their own sum in fp32; a second kernel adds the parts in their
order, so that a row has the same bits beside any others. Import it only where Triton and a CUDA device are.
"""

# Kernels are compiled from their source and launched with arguments that their Python signature does not have.
# pyright: reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from lit_qrl.functional._launch import Launch, pieces, power_of_2

PART = 8192
"""Words of one program."""


@triton.jit
def _part_kernel(scores, tokens, top, total, above, stride, words, parts, PART: tl.constexpr):
    """The largest score of a part, the sum of e^(s − that), and how many are not below the drawn token's."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    own = tl.load(scores + row * stride + tl.load(tokens + row)).to(tl.float32)
    word = part * PART + tl.arange(0, PART)
    there = word < words
    values = tl.load(scores + row * stride + word, mask=there, other=float("-inf")).to(tl.float32)
    largest = tl.max(values, axis=0)
    shares = tl.exp(values - tl.where(largest == float("-inf"), 0.0, largest))
    place = row * parts + part
    tl.store(top + place, largest)
    tl.store(total + place, tl.sum(shares, axis=0))
    tl.store(above + place, tl.sum((there & (values >= own)).to(tl.int32), axis=0))


@triton.jit
def _whole_kernel(scores, tokens, top, total, above, logprobs, ranks, stride, parts, PARTS: tl.constexpr):
    """One row from its parts."""
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    there, place = part < parts, row * parts + part
    own = tl.load(scores + row * stride + tl.load(tokens + row)).to(tl.float32)
    tops = tl.load(top + place, mask=there, other=float("-inf"))
    largest = tl.max(tops, axis=0)
    shares = tl.load(total + place, mask=there, other=0.0) * tl.exp(tops - largest)
    tl.store(logprobs + row, own - largest - tl.log(tl.sum(shares, axis=0)))
    tl.store(ranks + row, tl.sum(tl.load(above + place, mask=there, other=0), axis=0).to(tl.int64))


_part, _whole = Launch(_part_kernel), Launch(_whole_kernel)


def scored(scores: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probs " rows" (fp32) and ranks " rows" (int64, 1 is the likeliest) of drawn tokens.

    Args:
        scores: "rows words", any floating dtype, the last dimension contiguous; −∞ is a word that cannot be drawn.
        tokens: " rows", int64.
    """
    rows, words = scores.shape
    parts = pieces(words, PART)
    top, total = torch.empty((2, rows, parts), dtype=torch.float32, device=scores.device)
    above = torch.empty((rows, parts), dtype=torch.int32, device=scores.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=scores.device)
    ranks = torch.empty(rows, dtype=torch.int64, device=scores.device)
    stride = scores.stride(0)
    _part((rows, parts), (scores, tokens, top, total, above), (stride, words, parts), (PART,), num_warps=8)
    _whole(
        (rows,),
        (scores, tokens, top, total, above, logprobs, ranks),
        (stride, parts),
        (power_of_2(parts),),
        num_warps=1,
    )
    return logprobs, ranks
