"""The sums of `checksum.Checksums` in one pass over memory; import it only where Triton and a CUDA device are."""

# Kernels are compiled from their source and launched with arguments that their Python signature does not have.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from lit_qrl.functional._launch import pieces, remembered

# Words of 8 bytes that one program sums.
TILE = 8192
# Columns of a program's tile.
WIDE, NARROW = 128, 8
# int64 numbers of each block of memory that the sums are taken from: 8 MiB, zeroed at once.
POOL = 1 << 20

# Per dtype, what shows that a number is not finite: the bits that are then all ones, and the lowest of them. Adding
# the lowest one carries into the bit above exactly then, for all numbers of a word at once.
_EXPONENTS: dict[torch.dtype, tuple[int, int, int]] = {
    torch.bfloat16: (16, 0x7F80, 0x0080),
    torch.float16: (16, 0x7C00, 0x0400),
    torch.float32: (32, 0x7F800000, 0x00800000),
    torch.float64: (64, 0x7FF0000000000000, 0x0010000000000000),
    # E4M3 has no infinity and one NaN of each sign, all bits set; E8M0 has one NaN, all bits set, and no sign.
    torch.float8_e4m3fn: (8, 0x7F, 0x01),
    torch.float8_e8m0fnu: (8, 0x7F, 0x01),
    torch.float8_e5m2: (8, 0x7C, 0x04),
}


def _repeated(width: int, value: int) -> int:
    """Return the pattern of `width` bits in every place of a signed 64-bit word."""
    word = sum(value << shift for shift in range(0, 64, width))
    return word - 2**64 if word >= 2**63 else word


_PATTERNS = {
    dtype: (_repeated(width, ones), _repeated(width, lowest), _repeated(width, 1 << (width - 1)))
    for dtype, (width, ones, lowest) in _EXPONENTS.items()
}


@remembered
@triton.jit(do_not_specialize=["start", "step", "rows", "columns", "ones", "lowest", "signs"])
def _sums_kernel(
    stack, sums, start, step, rows, columns, ones, lowest, signs,
    CHECK: tl.constexpr, UNSIGNED: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Add one tile's sums over rows and columns to those of its matrix: `rows`, `columns`, then what is not finite."""
    matrix = tl.program_id(2).to(tl.int64)
    bits = stack.to(tl.pointer_type(tl.int64)) + matrix * step
    start += matrix * (rows + columns + 1)
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column = tl.program_id(1) * C + tl.arange(0, C)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    words = tl.load(bits + row[:, None] * columns + column[None, :], mask=inside, other=0)
    tl.atomic_add(sums + start + row, tl.sum(words, axis=1), mask=row < rows, sem="relaxed")
    tl.atomic_add(sums + start + rows + column, tl.sum(words, axis=0), mask=column < columns, sem="relaxed")
    if CHECK:
        carried = ((words & ones) + lowest) & signs
        if UNSIGNED:
            carried = carried & words
        found = tl.max(tl.max((carried != 0).to(tl.int32), axis=1), axis=0)
        tl.atomic_add(sums + start + rows + columns, found.to(tl.int64), mask=found > 0, sem="relaxed")


class Sums:
    """Memory for the sums of many tensors."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = torch.empty(0, dtype=torch.int64, device=device)
        self._used = 0

    def of(self, stack: Tensor, count: int, rows: int, columns: int, step: int) -> Tensor:
        """Return sums over rows, over columns, and a number above 0 where a float is not finite, of matrix by matrix.

        One launch takes them of all.

        Args:
            stack: memory of matrices of 8-byte words.
            count: of matrices.
            rows: of each.
            columns: of each, a power of two.
            step: words from one matrix to the next.
        """
        start, size = self._used, count * (rows + columns + 1)
        if start + size > self._pool.numel():
            self._pool = torch.zeros(max(POOL, size), dtype=torch.int64, device=self.device)
            start = 0
        self._used = start + size
        dtype = stack.dtype
        if dtype.itemsize == 1:  # not all of which Triton knows
            stack = stack.view(torch.uint8)
        pattern = _PATTERNS.get(dtype)
        wide = WIDE if columns >= WIDE // 2 else NARROW  # two kernels to compile, not one for every power of two
        high = TILE // wide
        ones, lowest, signs = pattern or (0, 0, 0)
        grid = (pieces(rows, high), pieces(columns, wide), count)
        unsigned = dtype == torch.float8_e8m0fnu
        _sums_kernel[grid](
            stack, self._pool, start, step, rows, columns, ones, lowest, signs, pattern is not None, unsigned,
            high, wide, num_warps=8,
        )  # fmt: skip
        return self._pool[start : start + size]
