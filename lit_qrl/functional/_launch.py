"""Which Triton kernels a run has, and the sizes that launches are reckoned with."""

import os
from functools import lru_cache
from importlib.util import find_spec

from lit_qrl.errors import ConfigError

KERNELS = [
    "checksum",
    "decoding",
    "denoising",
    "drawing",
    "fp4_weights",
    "fp8_weights",
    "gated",
    "int4_weights",
    "joined",
    "logprobs",
    "masters",
    "norm",
    "rotary",
    "rows",
    "tiles",
    "together",
    "tokens",
    "transposed",
    "turned",
    "values",
]
"""What can be switched off."""


@lru_cache
def triton_installed(kernel: str = "") -> bool:
    """Return True when Triton can be imported, and the kernel of that name is not switched off.

    The environment variable LIT_QRL_WITHOUT names, joined by commas, kernels that a run is to do without, so that one
    can measure what each is worth (`benchmarks/iteration.py --without`). It is read once in a process.

    Raises:
        ConfigError: the variable names something else than `KERNELS`.
    """
    without = [name for name in os.environ.get("LIT_QRL_WITHOUT", "").split(",") if name]
    if unknown := [name for name in without if name not in KERNELS]:
        raise ConfigError("LIT_QRL_WITHOUT names no kernel.", expected=", ".join(KERNELS), given=", ".join(unknown))
    return find_spec("triton") is not None and kernel not in without


def pieces(count: int, size: int) -> int:
    """Return how many pieces of `size` hold `count`; Triton's own function takes longer than an empty launch.

    >>> pieces(257, 128)
    3
    """
    return -(-count // size)


def power_of_2(count: int) -> int:
    """Return the smallest power of two that is not below `count`.

    >>> power_of_2(1536), power_of_2(64)
    (2048, 64)
    """
    return 1 << (count - 1).bit_length()
