"""Which Triton kernels a run has, how they are started, and the sizes that launches are reckoned with."""

import os
from collections.abc import Callable
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from lit_qrl.errors import ConfigError

KERNELS = [
    "checksum",
    "decoding",
    "denoising",
    "drawing",
    "few_rows",
    "fp4_weights",
    "fp8_weights",
    "gated",
    "int4_weights",
    "joined",
    "logprobs",
    "masters",
    "norm",
    "remembered",
    "rotary",
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


class Remembered:
    """A Triton kernel that is started as a launch of the same kind was, without asking Triton which compiled one fits.

    Triton looks that up at each launch, from every argument, option and setting, which takes the host longer than many
    of these kernels take the device. Alike are launches with the same dtypes, constants and options, whose pointers are
    multiples of 16 bytes in the same places and whose integers are 1, multiples of 16 or of 32 bits in the same places:
    what Triton compiles by. Hooks that profilers add to Triton see the first launch of a kind alone; those of CUDA see
    all.

    Args:
        kernel: what `triton.jit` made.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel, self._made = kernel, {}
        self._constant = [one.is_constexpr for one in kernel.params]
        self._plain = [one.do_not_specialize for one in kernel.params]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Return what starts it in so many programs, on the current stream."""
        return partial(self._start, grid)

    def _start(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        if torch.compiler.is_compiling():  # which takes a kernel into its graph, and no address
            self._kernel[grid](*arguments, **options)
            return
        device, taken, kinds = -1, [], []
        for one, constant, plain in zip(arguments, self._constant, self._plain, strict=True):
            if isinstance(one, Tensor):
                device, kind, one = one.get_device(), one.dtype, one.data_ptr()
                kinds += kind, one % 16
            elif constant or type(one) is not int:
                kinds.append(type(one) if type(one) is float and not constant else one)
            else:
                kinds.append((-(2**31) <= one < 2**31, not plain and (one == 1 or (one % 16 == 0 and 16))))
            taken.append(one)
        key = (device, *kinds, *options.values())
        made = self._made.get(key)
        if made is None:
            compiled = self._kernel[grid](*arguments, **options)
            self._made[key] = compiled.run, compiled.function, compiled.packed_metadata
            return
        run, function, metadata = made
        x, y, z = (*grid, 1, 1)[:3]
        # metadata for hooks, and two hooks: none; a pointer that is a number is not looked up in the driver
        run(x, y, z, torch._C._cuda_getCurrentRawStream(device), function, metadata, None, None, None, *taken)


def remembered(kernel: Any) -> Any:
    """Return a kernel as `Remembered`; itself under Triton's interpreter, which compiles none."""
    return Remembered(kernel) if hasattr(kernel, "device_caches") and triton_installed("remembered") else kernel
