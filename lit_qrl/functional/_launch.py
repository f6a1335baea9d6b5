"""Starts Triton kernels that have been started alike before without asking Triton again which compiled one fits."""

from typing import Any

import torch
from torch import Tensor

ALIGNED = 16
"""Triton compiles a kernel of its own for pointers that are multiples of this many bytes."""
MOST = 4096
"""Kinds of launches that are remembered of a kernel; lengths differ from one micro-batch to the next."""


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


def _width(number: int | float) -> int:
    """Return the bits of the type that a kernel takes an integer as; 65 where no signed one holds it."""
    if not isinstance(number, int):
        raise TypeError(f"A kernel that is compiled for all numbers takes integers. Given: {number}.")
    return 32 if -(2**31) <= number < 2**31 else 64 if -(2**63) <= number < 2**63 else 65


class Launch:
    """A Triton kernel whose parameters are tensors, then numbers, then constants.

    Triton chooses the compiled kernel anew at each launch, from every argument, every option, its settings and the
    globals that the kernel reads: longer than many of these kernels take on the device. A launch with the dtypes,
    numbers, constants and options of one before takes the same compiled kernel, so that one is kept. Pointers that
    are not aligned go Triton's own way. Hooks that profilers add to Triton see the first launch of a kind alone;
    those of CUDA see all.

    Args:
        kernel: what `triton.jit` made.
        specialized: whether it is compiled anew for numbers that are one, or multiples of 16; False where
            `do_not_specialize` names them all, so that they count by their width alone.
    """

    def __init__(self, kernel: Any, specialized: bool = True) -> None:
        self.kernel, self._specialized = kernel, specialized
        self._made: dict[Any, Any] = {}
        self._keeps = True

    def __call__(
        self,
        grid: tuple[int, ...],
        tensors: tuple[Tensor, ...],
        numbers: tuple[int | float, ...],
        constants: tuple[Any, ...],
        **options: Any,
    ) -> None:
        """Start the kernel on the current stream.

        Args:
            grid: programs along one to three dimensions.
            tensors: of one device; the kernel's first arguments.
            numbers: its next ones.
            constants: its `tl.constexpr` arguments.
            **options: of the compilation, such as `num_warps`, in the same order at each launch.
        """
        if torch.compiler.is_compiling():  # which takes a kernel into its graph, and no address
            self.kernel[grid](*tensors, *numbers, *constants, **options)
            return
        device, together, pointers = tensors[0].get_device(), 0, []
        kinds = numbers if self._specialized else tuple(map(_width, numbers))
        key = [device, kinds, constants, *options.values()]
        for tensor in tensors:
            pointer = tensor.data_ptr()
            together |= pointer
            pointers.append(pointer)
            key.append(tensor.dtype)
        key = tuple(key)
        aligned = not together % ALIGNED
        made = self._made.get(key) if aligned else None
        if made is None:
            compiled = self.kernel[grid](*tensors, *numbers, *constants, **options)
            found = [getattr(compiled, name, None) for name in ("run", "function", "packed_metadata")]
            if aligned and self._keeps and None not in found:  # there is none under the interpreter
                if len(self._made) >= MOST:
                    self._made.clear()
                self._made[key] = found
            return
        run, function, metadata = made
        along, across, deep = (*grid, 1, 1)[:3]
        stream = torch._C._cuda_getCurrentRawStream(device)
        try:
            # metadata for hooks, and two hooks: none. A pointer that is a number is not looked up in the driver.
            run(along, across, deep, stream, function, metadata, None, None, None, *pointers, *numbers, *constants)
        except TypeError:  # a Triton whose compiled kernels take other arguments
            self._keeps = False
            self._made.clear()
            self.kernel[grid](*tensors, *numbers, *constants, **options)
