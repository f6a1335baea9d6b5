"""The low-bit GEMMs of CUDA devices, and when they may be used."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 128
MANY = 65
"""Rows from which on vLLM's kernels keep one order: for at most 64 FlashAttention 3 takes other tiles (a sequence's
queries times the heads of a head of keys), and CUTLASS the transposed product."""
MOST_ROWS, FEW_ROWS = 128, 32
"""Rows up to which the product of `products_triton` is no slower than cuBLASLt's with scales of rows or for weights of
few tiles, and for all."""
SMALL = 10**7
"""Numbers of a weight up to which it is twice as many."""
FEW_TILES = 132
"""Tiles of 128 outputs from which on a weight keeps an H200's multiprocessors busy."""
# cuBLASLt wants leading dimensions of 8-bit operands in units of 16 bytes, and block scales padded to four columns.
_ALIGNMENT = 16
_SCALE_ALIGNMENT = 4
# Numbers of rows at which a device may change the kernel of its block-scaled GEMM; results of fewer rows are compared
# with those of the last.
_ROW_STEPS = (16, 32, 64, 128, 256, 512, 2048)
# torch._int_mm on CUDA refuses fewer than 17 rows.
_INT_MM_ROWS = 32


@lru_cache
def capability(index: int | None) -> tuple[int, int]:
    """Return the compute capability of a CUDA device; None is the current one."""
    return torch.cuda.get_device_capability(index)


class Requirement(NamedTuple):
    """What a GPU must have for a kernel.

    Args:
        capability: compute capability.
        newer: whether later ones will do too.
        cuda: the oldest CUDA that torch may be built for, or None for any.

    >>> print(Requirement((8, 9)))
    compute capability 8.9 or newer
    """

    capability: tuple[int, int]
    newer: bool = True
    cuda: tuple[int, int] | None = None

    def met(self, device: torch.device) -> bool:
        """Return True for a CUDA device that has it."""
        if device.type != "cuda" or (self.cuda is not None and _cuda() < self.cuda):
            return False
        there = capability(device.index)
        return there >= self.capability if self.newer else there == self.capability

    def given(self, device: torch.device) -> str:
        """Return what a CUDA device has of it."""
        version = f", CUDA {torch.version.cuda}" if self.cuda is not None else ""
        return f"{torch.cuda.get_device_name(device)} ({_dotted(capability(device.index))}{version})"

    def __str__(self) -> str:
        """Return it in words."""
        text = f"compute capability {_dotted(self.capability)}{' or newer' * self.newer}"
        return text if self.cuda is None else f"{text} and CUDA {_dotted(self.cuda)} or newer"


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _cuda() -> tuple[int, ...]:
    return tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])


# E4M3 (below, Triton has no such numbers either), cuBLASLt's 1×128 by 128×128 scaling, `torch._int_mm` on tensor cores.
FP8, FP8_BLOCKS, INT8 = Requirement((8, 9)), Requirement((9, 0), newer=False, cuda=(12, 9)), Requirement((8, 0))


def has_fp8(device: torch.device) -> bool:
    """Return True for a GPU that knows E4M3."""
    return FP8.met(device)


def fp8_gemm(device: torch.device, shape: tuple[int, int]) -> bool:
    """Return True when the device multiplies FP8 by FP8 and the weight's shape fits."""
    return has_fp8(device) and hasattr(F, "scaled_mm") and all(size % _ALIGNMENT == 0 for size in shape)


def fp8_block_gemm(device: torch.device, shape: tuple[int, int]) -> bool:
    """Return True when cuBLASLt has the 1×128 by 128×128 scaling and the weight's shape fits."""
    return FP8_BLOCKS.met(device) and fp8_gemm(device, shape) and all(size % BLOCK == 0 for size in shape)


def few_rows(m: int, n: int, k: int, by_rows: bool = False) -> bool:
    """Return whether the product of `products_triton` is the faster one for `m` rows and a weight "n k".

    >>> few_rows(128, 3584, 3584), few_rows(128, 37888, 3584), few_rows(16, 37888, 3584), few_rows(16, 100, 3584)
    (True, False, True, False)
    """
    most = MOST_ROWS if by_rows or n // BLOCK < FEW_TILES else FEW_ROWS
    return n % BLOCK == k % BLOCK == 0 and m <= (2 * MOST_ROWS if n * k <= SMALL else most)


def int8_gemm(device: torch.device, shape: tuple[int, int]) -> bool:
    """Return True when `torch._int_mm` runs on the device's tensor cores and the weight's shape fits."""
    return INT8.met(device) and all(size % 8 == 0 for size in shape)


def scaled_mm(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return `(a · scale_a) @ (b · scale_b).T + bias` with scales per tensor (one element) or per row.

    Args:
        a: "m k", float8_e4m3fn.
        scale_a: one fp32 number, or "m 1".
        b: "n k", float8_e4m3fn.
        scale_b: one fp32 number, or "n 1".
        bias: " n", or None.
        dtype: of the result.
    """
    # cuBLASLt mixes no granularities: when one operand has a scale per row, the other's single scale is repeated.
    if scale_a.numel() == 1 and scale_b.numel() == 1:
        recipe = F.ScalingType.TensorWise
        scale_a, scale_b = scale_a.reshape(()), scale_b.reshape(())
    else:
        recipe = F.ScalingType.RowWise
        scale_a = scale_a.reshape(-1, 1).expand(a.shape[0], 1).contiguous()
        scale_b = scale_b.reshape(1, -1).expand(1, b.shape[0]).contiguous()
    # A bias is added outside: the GEMM's own exists for bf16 and fp16 results only and rounds in another place.
    out = F.scaled_mm(a, b.t(), scale_a, recipe, scale_b, recipe, output_dtype=dtype)
    return out if bias is None else out.add_(bias)


def scaled_mm_block(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    blocks: bool = True,
) -> Tensor:
    """Return `(a · scale_a) @ (b · scale_b).T + bias` with `a` scaled per 1×128 and `b` per 128×128 or 1×128.

    Args:
        a: "m k", float8_e4m3fn.
        scale_a: "m k/128", fp32.
        b: "n k", float8_e4m3fn.
        scale_b: what `block_scale_layout` made of "n/128 k/128"; with `blocks=False` "n k/128", for 1×128.
        bias: " n", or None.
        dtype: of the result.
        blocks: whether `b` is scaled per 128×128, as a weight is, or per 1×128, as in a weight's gradient.
    """
    rows = a.shape[0]
    least = settled_rows(b.shape[0], b.shape[1], b.device, dtype) if blocks and rows < _ROW_STEPS[-1] else 0
    padding = max(least - rows, -rows % _SCALE_ALIGNMENT)
    if padding:
        a = F.pad(a.view(torch.uint8), (0, 0, 0, padding)).view(a.dtype)
        scale_a = F.pad(scale_a, (0, 0, 0, padding), value=1.0)
    scale_b = scale_b if blocks else _column_major(scale_b)
    out = block_product(a, _column_major(scale_a), b, scale_b, dtype, blocks)
    out = out[:rows] if padding else out
    return out if bias is None else out.add_(bias)


def block_product(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, dtype: torch.dtype, blocks: bool = True
) -> Tensor:
    """Return what `scaled_mm_block` does of rows in fours, with both scales as cuBLASLt reads them."""
    one = F.ScalingType.BlockWise1x128
    other = F.ScalingType.BlockWise128x128 if blocks else one
    return F.scaled_mm(a, b.t(), scale_a, one, scale_b, other, output_dtype=dtype)


@torch.compiler.assume_constant_result
def settled_rows(n: int, k: int, device: torch.device, dtype: torch.dtype) -> int:
    """Return the number of rows from which on the block-scaled GEMM gives a row the same bits however many there are.

    For few rows cuBLASLt takes another kernel, which adds in another order; decoding would then differ from scoring
    in the last bit, and FP8 makes steps of 2⁻³ of such bits. Fewer rows than this are padded: a GEMM of so few waits
    for its weight anyhow. Measured once per weight shape; 0 where no number settles it.

    Args:
        n: rows of the weight.
        k: its columns.
        device: where it lies.
        dtype: of the result.
    """
    return _settled_rows(n, k, device, dtype)


@lru_cache(maxsize=256)
@torch.inference_mode(False)
@torch.no_grad()
def _settled_rows(n: int, k: int, device: torch.device, dtype: torch.dtype) -> int:
    # in fp32, whatever a trainer's precision has made the default
    drawn: Any = {"generator": torch.Generator(device).manual_seed(0), "device": device, "dtype": torch.float32}
    a, b = (torch.randn(rows, k, **drawn) for rows in (_ROW_STEPS[-1], n))
    scale_a = torch.rand(_ROW_STEPS[-1], k // BLOCK, **drawn) + 0.5
    scale_b = block_scale_layout(torch.rand(n // BLOCK, k // BLOCK, **drawn) + 0.5)
    a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)

    def product(rows: int) -> Tensor:
        return block_product(a[:rows], _column_major(scale_a[:rows]), b, scale_b, dtype, blocks=True)

    return smallest_settled(product)


def smallest_settled(product: Callable[[int], Tensor], steps: Sequence[int] = _ROW_STEPS) -> int:
    """Return the smallest of `steps` from which on `product(rows)` is the beginning of `product(steps[-1])`, or 0.

    >>> smallest_settled(lambda rows: torch.full((rows,), float(rows >= 64)))
    64
    """
    whole, settled = product(steps[-1]), 0
    for rows in reversed(steps[:-1]):
        if not torch.equal(product(rows), whole[:rows]):
            break
        settled = rows
    return settled


def block_scale_layout(scale: Tensor) -> Tensor:
    """Return 128×128 scales ("n/128 k/128") as cuBLASLt reads them: "k/128 (padded to 4), n/128", column by column."""
    columns = scale.shape[1]
    padded = ceil(columns / _SCALE_ALIGNMENT) * _SCALE_ALIGNMENT
    return F.pad(scale.float(), (0, padded - columns), value=1.0).contiguous().t()


def int_mm(a: Tensor, b: Tensor) -> Tensor:
    """Return `a @ b.T` of int8 matrices "m k" and "n k", as int32."""
    rows = a.shape[0]
    if rows < _INT_MM_ROWS:
        a = F.pad(a, (0, 0, 0, _INT_MM_ROWS - rows))
    return torch._int_mm(a, b.t())[:rows]


def _column_major(scale: Tensor) -> Tensor:
    """Return scales whose columns lie one behind another, which the product asks of a single column, too."""
    if scale.stride() == (1, scale.shape[0]):
        return scale
    # a copy in any case: what `contiguous` finds in order may begin a longer column
    return scale.t().clone(memory_format=torch.contiguous_format).t()
