"""Checksums of tensors that see every bit and every position, computed where the tensor lives."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lit_qrl.formats.kernels import dispatch

if TYPE_CHECKING:
    from lit_qrl.receipts.checksum_triton import Sums

# Odd constants of a 64-bit integer mix (the golden ratio, and the two of the splitmix64 generator), as signed integers.
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
MIX_A, MIX_B = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
# Keeps the weights of column positions apart from those of row positions.
COLUMN_OFFSET = 1 << 40


def as_matrix(tensor: Tensor) -> Tensor:
    """Return the bits of `tensor` as an integer matrix whose width depends on the number of bytes alone.

    >>> as_matrix(torch.zeros(6, 4, dtype=torch.float32)).shape
    torch.Size([3, 4])
    """
    flat = tensor.detach().contiguous().reshape(-1)
    size = flat.numel() * flat.element_size()
    width = next(width for width in (8, 4, 2, 1) if size % width == 0)
    dtype = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[width]
    if flat.storage_offset() * flat.element_size() % width:
        flat = flat.clone()
    bits = flat.view(dtype)
    count = max(bits.numel(), 1)
    # About a square: then the sums over rows and over columns are both short.
    columns = math.gcd(count, 1 << max(count.bit_length() // 2, 1))
    return bits.view(-1, columns)


def position_weights(start: int, count: int, device: torch.device) -> Tensor:
    """Return odd pseudo-random int64 multipliers of the positions `start` … `start + count − 1` (splitmix64)."""
    return scrambled(torch.arange(start + 1, start + count + 1, device=device, dtype=torch.int64) * GOLDEN) | 1


def scrambled(x: Tensor) -> Tensor:
    """Return the bijection of int64 onto itself that ends splitmix64: each bit of `x` moves about half of all bits."""
    x = (x ^ _shift(x, 30)) * MIX_A
    x = (x ^ _shift(x, 27)) * MIX_B
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


class Checksums:
    """Collects tensors and returns for each a 64-bit checksum and whether it is finite, in one transfer per device.

    The bits, as 64-bit integers x_ij of a matrix that is about square, are summed modulo 2⁶⁴ over its rows and over
    its columns, and the sums scrambled by position: Σ_i h(u_i Σ_j x_ij) + Σ_j h(v_j Σ_i x_ij) with odd u and v and the
    bijection h of `scrambled`. Two plain reductions per tensor read it twice and hold nothing of its size; on CUDA one
    kernel reads it once. A changed value, exchanged elements, rows or columns, a transposed block and a change of sign
    all move the result; what stays unseen leaves the sums of every row and of every column as they were.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._sums: list[tuple[Tensor, Tensor]] = []
        self._extremes: list[tuple[str, Tensor]] = []
        self._non_finite: list[str] = []
        self._counts: list[tuple[str, Tensor]] = []
        self._fused: dict[torch.device, Sums] = {}

    def __reduce__(self) -> tuple:
        """Travel empty: what was finished is in the receipts, and what was collected stays in its process."""
        return (Checksums, ())

    def add(self, name: str, tensor: Tensor) -> None:
        """Remember the sums of one tensor; nothing waits for the device."""
        bits = as_matrix(tensor)
        self._names.append(name)
        if bits.dtype == torch.int64 and dispatch.available(bits):
            self._add_fused(name, bits, tensor.dtype)
            return
        self._sums.append((bits.sum(dim=1, dtype=torch.int64), bits.sum(dim=0, dtype=torch.int64)))
        if tensor.is_floating_point() and tensor.numel():
            low, high = _extremes(tensor.detach())
            if tensor.device.type != "cpu":
                self._extremes.append((name, torch.stack((low, high)).float()))
            elif not (math.isfinite(low) and math.isfinite(high)):
                self._non_finite.append(name)

    def _add_fused(self, name: str, bits: Tensor, dtype: torch.dtype) -> None:
        from lit_qrl.receipts.checksum_triton import Sums

        if bits.device not in self._fused:
            self._fused[bits.device] = Sums(bits.device)
        rows, columns, not_finite = self._fused[bits.device].of(bits, dtype)
        self._sums.append((rows, columns))
        if not_finite is not None:
            self._counts.append((name, not_finite))

    def first_non_finite(self, wait: bool = True) -> str | None:
        """Return a name whose tensor holds NaN or infinity, the first added if there are more, or None.

        Args:
            wait: ask the accelerators too, which the host waits for; otherwise what was found on the CPU counts alone.
        """
        if wait:
            self._settle()
        return self._non_finite[0] if self._non_finite else None

    def _settle(self) -> None:
        if self._extremes:
            device = self._extremes[0][1].device
            finite = torch.stack([value.to(device) for _, value in self._extremes]).isfinite().all(dim=1).tolist()
            self._non_finite += [name for (name, _), good in zip(self._extremes, finite, strict=True) if not good]
            self._extremes = []
        if self._counts:
            device = self._counts[0][1].device
            counts = torch.cat([count.to(device) for _, count in self._counts]).tolist()
            self._non_finite += [name for (name, _), count in zip(self._counts, counts, strict=True) if count]
            self._counts = []
        order = {name: index for index, name in enumerate(self._names)}
        self._non_finite.sort(key=lambda name: order[name])

    def finish(self) -> dict[str, tuple[int, bool]]:
        """Return (checksum, finite) by name."""
        self._settle()
        bad = set(self._non_finite)
        result: dict[str, tuple[int, bool]] = {}
        by_device: dict[torch.device, list[int]] = {}
        for index, (rows, _) in enumerate(self._sums):
            by_device.setdefault(rows.device, []).append(index)
        for device, members in by_device.items():
            sums = torch.zeros(len(members), dtype=torch.int64, device=device)
            for axis, offset in ((0, 0), (1, COLUMN_OFFSET)):
                parts = [self._sums[index][axis] for index in members]
                lengths = [part.shape[0] for part in parts]
                table = position_weights(offset, max(lengths), device)
                weights = torch.cat([table[:length] for length in lengths])
                owner = torch.repeat_interleave(
                    torch.arange(len(members), device=device),
                    torch.tensor(lengths, device=device),
                    output_size=sum(lengths),
                )
                sums.index_add_(0, owner, scrambled(torch.cat(parts) * weights))
            for index, value in zip(members, sums.tolist(), strict=True):
                result[self._names[index]] = value, self._names[index] not in bad
        return {name: result[name] for name in self._names}


def checksum(tensor: Tensor) -> int:
    """Return the checksum of one tensor's bits.

    >>> a = torch.arange(6.0).view(2, 3)
    >>> checksum(a) == checksum(a.clone()), checksum(a) == checksum(a.flip(0))
    (True, False)
    """
    collected = Checksums()
    collected.add("tensor", tensor)
    return collected.finish()["tensor"][0]


def warm_up(device: torch.device) -> None:
    """Compile the kernels on an accelerator, so that the first publish does not wait for them."""
    sums = Checksums()
    for dtype in (torch.bfloat16, torch.int32):
        for count in (32, 1 << 16):  # a narrow matrix and a wide one
            sums.add(f"{dtype} {count}", torch.zeros(count, dtype=dtype, device=device))
    sums.finish()


def _extremes(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return two numbers that are finite exactly when all of `tensor` is."""
    if tensor.element_size() > 1:
        return torch.aminmax(tensor)
    # NaN is a code with all seven lower bits set in E4M3, which has no infinity, and the last code in E8M0.
    nan_codes = {torch.float8_e4m3fn: 0x7F, torch.float8_e8m0fnu: 0xFF}
    if tensor.dtype not in nan_codes:
        return torch.aminmax(tensor.float())
    last = nan_codes[tensor.dtype]
    highest = tensor.view(torch.uint8).bitwise_and(last).amax()
    high = highest.float().masked_fill_(highest == last, float("nan"))
    return high, high
