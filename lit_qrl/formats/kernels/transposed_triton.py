"""A Triton kernel that transposes codes of one byte; import it only where Triton and a CUDA device are.

torch's own copy moves them byte by byte. Here a thread reads rows below one another, so that what crosses shared memory
are whole words, and both sides are read and written in order.
"""

# Kernels are compiled from their source and launched with arguments that their Python signature does not have.
# pyright: reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from lit_qrl.functional._launch import pieces, remembered

SIZE = 128
"""Rows and columns that a program turns."""
DEEP = 4
"""Rows below one another that a thread holds: the bytes of a word."""


@remembered
@triton.jit
def _transposed_kernel(codes, out, rows, columns, SIZE: tl.constexpr, DEEP: tl.constexpr):
    """One tile; row d of thread row i stands at i + d · apart, where the compiler puts what one thread holds."""
    apart: tl.constexpr = SIZE // DEEP
    tile_column, tile_row = tl.program_id(0), tl.program_id(1)
    place = tl.arange(0, SIZE)
    row = tile_row * SIZE + (place % apart) * DEEP + place // apart
    column = tile_column * SIZE + place
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    values = tl.load(codes + row.to(tl.int64)[:, None] * columns + column[None, :], mask=inside, other=0)
    turned = tl.reshape(tl.permute(tl.reshape(values, (DEEP, apart, SIZE)), (2, 1, 0)), (SIZE, SIZE))
    to = tile_row * SIZE + place
    written = (column < columns)[:, None] & (to < rows)[None, :]
    tl.store(out + column.to(tl.int64)[:, None] * rows + to[None, :], turned, mask=written)


def transposed(codes: Tensor) -> Tensor:
    """Return codes "n k" as "k n".

    Args:
        codes: of a dtype of one byte, contiguous.
    """
    rows, columns = codes.shape
    out = torch.empty((columns, rows), dtype=codes.dtype, device=codes.device)
    grid = pieces(columns, SIZE), pieces(rows, SIZE)
    tensors = codes.view(torch.uint8), out.view(torch.uint8)
    _transposed_kernel[grid](*tensors, rows, columns, SIZE, DEEP, num_warps=4)
    return out
