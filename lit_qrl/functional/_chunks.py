"""In how many pieces logits are made: how many are held at once, and how many may stay for the backward pass."""

import math
from functools import lru_cache

import torch

CHUNK_ELEMENTS = {"cpu": 2**22, "cuda": 2**26}
"""Logits held at once: 16 MB of fp32 on a CPU (about its last-level cache), 256 MB on a GPU (440 rows of a 150,000-word
vocabulary, enough to fill its matrix units). The entropy takes three times as much for a moment. Where one kernel
reduces them they stay in 16 bits, and as many go at once as `KERNEL_SHARE` says."""
KERNEL_SHARE = 1 / 64
"""Of a GPU's memory that a chunk of 16-bit logits takes at most: each chunk is added to the weight's gradient in fp32,
which takes as long as two fifths of the product that makes it for 1,800 rows, and nothing where one chunk is all."""


def kernel_elements(memory: int) -> int:
    """Return how many 16-bit logits are held at once on a GPU: a power of two, at least as many as of fp32.

    Args:
        memory: of the GPU, bytes.

    >>> [kernel_elements(gib << 30) >> 20 for gib in (16, 80, 141)]
    [128, 512, 1024]
    """
    return max(CHUNK_ELEMENTS["cuda"], 2 ** int(math.log2(memory * KERNEL_SHARE / 2)))


def even_rows(count: int, most: int, multiple: int = 128) -> int:
    """Return how many rows a chunk has of `count`, so that all have about as many: a small product keeps no GPU busy.

    >>> even_rows(8192, 7067), even_rows(8192, 9000), even_rows(300, 7), even_rows(0, 7067)
    (4096, 8192, 7, 128)
    """
    count = max(count, 1)  # all tokens of a micro-batch may be masked
    chunks = -(-count // most)
    return min(-(-count // (chunks * multiple)) * multiple, most)


def held_chunks(count: int, size: int, room: int) -> int:
    """Return how many of `count` chunks of logits may stay, where one that does not is at work beside them.

    Args:
        count: chunks.
        size: of one, bytes.
        room: for all of them, bytes.

    >>> [held_chunks(4, 10, room) for room in (5, 15, 25, 39, 40)]
    [0, 0, 1, 2, 4]
    """
    fit = room // max(size, 1)
    return count if fit >= count else max(fit - 1, 0)


@lru_cache
def total_memory(index: int | None) -> int:
    """Return the bytes of a GPU; None is the current one."""
    return torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index).total_memory
