"""A Triton kernel that makes the noise by which tokens are drawn, of all rows at once, each from a seed of its own.

Import it only where Triton and a CUDA device are.
"""

# Kernels are compiled from their source and launched with arguments that their Python signature does not have.
# pyright: reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

SIZE = 1024
"""Counters of one program; each gives four numbers."""


@triton.jit
def _exponential(bits):
    """-ln(1 - u) of u = (bits + 1/2) / 2^32, above 0; the smallest numbers, which decide, keep all their bits."""
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    return tl.where(u < 0.001, u + u * u * (0.5 + u * 0.33333334), -tl.log(1.0 - u))


@triton.jit
def _noise_kernel(noise, rows, seeds, draws, words, quarter, SIZE: tl.constexpr):
    """A part of one row, by Philox: the key is the row's seed, the counter the word and the number of the draw."""
    asked = tl.program_id(0)
    seed, draw = tl.load(seeds + asked), tl.load(draws + asked)
    counter = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    nothing = counter * 0
    low, high = (draw & 0xFFFFFFFF).to(tl.int32), (draw >> 32).to(tl.int32)
    a, b, c, d = tl.philox(seed, counter, nothing + low, nothing + high, nothing)
    at = noise + tl.load(rows + asked) * words + counter
    tl.store(at, _exponential(a), mask=counter < quarter)
    tl.store(at + quarter, _exponential(b), mask=(counter < quarter) & (counter + quarter < words))
    tl.store(at + 2 * quarter, _exponential(c), mask=(counter < quarter) & (counter + 2 * quarter < words))
    tl.store(at + 3 * quarter, _exponential(d), mask=(counter < quarter) & (counter + 3 * quarter < words))


def exponential_rows(noise: Tensor, rows: Tensor, seeds: Tensor, draws: Tensor) -> None:
    """Write numbers of the exponential distribution with mean 1 into rows, that follow from seed and draw alone.

    Args:
        noise: "rows words", fp32, contiguous.
        rows: " n", numbers of the rows, int64.
        seeds: " n", int64.
        draws: " n", how many draws came before with that seed, int64.
    """
    words = noise.shape[1]
    quarter = triton.cdiv(words, 4)
    grid = (len(rows), triton.cdiv(quarter, SIZE))
    _noise_kernel[grid](noise, rows, seeds, draws, words, quarter, SIZE, num_warps=4)


def on_device(values: list[int], device: torch.device) -> Tensor:
    """Return whole numbers on a device, without waiting for it."""
    kept = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
    return kept.to(device, non_blocking=True)
