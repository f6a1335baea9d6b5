"""Checksums of tensors that see every bit and every position, computed where the tensor lives."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby, islice
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lit_qrl.formats.kernels import dispatch

if TYPE_CHECKING:
    from lit_qrl.receipts.checksum_triton import Sums

# Odd constants of a 64-bit integer mix (the golden ratio, and the two of the splitmix64 generator), as signed integers.
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
MIX_A, MIX_B = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
# Of so many bytes, the widest first.
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
# Keeps the weights of column positions apart from those of row positions.
COLUMN_OFFSET = 1 << 40
# Sums over rows and columns that are added up at once, 32 MiB: all of a dense model, some layers of many experts.
AT_ONCE = 1 << 22


class Matrices(NamedTuple):
    """The bits of each tensor of a stack as a matrix of integers, whose width depends on the number of bytes alone.

    Args:
        stack: the tensors; a copy where they are not laid out for it.
        width: bytes of an integer.
        count: of matrices.
        rows: of each.
        columns: of each.
        step: integers from one matrix to the next.
    """

    stack: Tensor
    width: int
    count: int
    rows: int
    columns: int
    step: int

    @classmethod
    def of(cls, stack: Tensor) -> "Matrices":
        """Return how the bits of "stack …" lie.

        >>> Matrices.of(torch.zeros(5, 6, 4)[1:, :3])[1:]
        (8, 4, 3, 2, 12)
        """
        count, one = stack.shape[0], stack.element_size()
        size = math.prod(stack.shape[1:]) * one
        width = next(width for width in _WORDS if size % width == 0)
        whole = stack.is_contiguous() or stack[:1].is_contiguous()
        if not whole or stack.storage_offset() * one % width or stack.stride(0) * one % width:
            stack = stack.detach().clone(memory_format=torch.contiguous_format)
        words = size // width
        # a number of columns that makes about a square: then the sums over rows and columns are both short
        columns = math.gcd(max(words, 1), 1 << max(max(words, 1).bit_length() // 2, 1))
        return cls(stack, width, count, words // columns, columns, stack.stride(0) * one // width)

    def bits(self) -> Tensor:
        """Return the integers, "matrices rows columns"."""
        size = self.rows * self.columns * self.width // self.stack.element_size()
        bits = self.stack.detach().as_strided((min(size, self.stack.numel()),), (1,)).view(_WORDS[self.width])
        return bits.as_strided((self.count, self.rows, self.columns), (self.step, self.columns, 1))


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


# Where a tensor lies, of those that `slices` cut.
_CUT = WeakTensorKeyDictionary()


class Slice(NamedTuple):
    """Where a tensor lies: in which stack, at which index of its first dimension, so many bytes from its start."""

    stack: Tensor
    index: int
    offset: int
    shape: torch.Size


def slices(stack: Tensor) -> tuple[Tensor, ...]:
    """Return the views of a stack along its first dimension, each with its `Slice`.

    >>> import torch
    >>> [one.tolist() for one in slices(torch.eye(2))]
    [[1.0, 0.0], [0.0, 1.0]]
    """
    cut = stack.unbind(0)
    step, shape = stack.stride(0) * stack.element_size(), stack.shape[1:]
    for index, one in enumerate(cut):
        _CUT[one] = Slice(stack, index, index * step, shape)
    return cut


def slice_of(tensor: Tensor) -> Slice | None:
    """Return where a tensor lies, or None for one that `slices` did not cut or that was moved since.

    >>> import torch
    >>> stack = torch.zeros(2, 3)
    >>> slice_of(slices(stack)[1]).index, slice_of(stack[1])
    (1, None)
    """
    found: Slice | None = _CUT.get(tensor)
    if found is None:
        return None
    here = tensor.data_ptr() == found[0].data_ptr() + found[2] and tensor.shape == found[3]
    return found if here else None


@dataclass(slots=True)
class _Entry:
    """Sums of the slices of one stack, or of one tensor.

    Args:
        numbers: one behind another for each slice: the sums over the rows of its bits, those over its columns, and a
            number above 0 where it is not finite.
        count: of slices.
        rows: of each.
        columns: of each.
        bad: for each slice whether it is not finite, once the host knows.
        sums: of each slice, once they are finished.
    """

    numbers: Tensor
    count: int
    rows: int
    columns: int
    bad: list[bool] | None = None
    sums: list[int] | None = None


class Checksums:
    """Collects tensors and returns for each a 64-bit checksum and whether it is finite, in one transfer per device.

    The bits, as 64-bit integers x_ij of a matrix that is about square, are summed modulo 2⁶⁴ over its rows and over
    its columns, and the sums scrambled by position: Σ_i h(u_i Σ_j x_ij) + Σ_j h(v_j Σ_i x_ij) with odd u and v and the
    bijection h of `scrambled`. Two plain reductions per tensor read it twice and hold nothing of its size; on CUDA one
    kernel reads it once. A changed value, exchanged elements, rows or columns, a transposed block and a change of sign
    all move the result; what stays unseen leaves the sums of every row and of every column as they were.

    The sums of a whole stack are taken when the first of its slices comes (`slices`), in as many launches as
    those of one tensor; each slice has the checksum that it has alone.
    """

    def __init__(self) -> None:
        self._places: dict[str, tuple[_Entry, int]] = {}
        self._entries: dict[torch.device, list[_Entry]] = defaultdict(list)
        # of stacks, with the number of writes to them at the time
        self._stacks = WeakTensorKeyDictionary()
        self._non_finite: str | None = None
        self._fused: dict[torch.device, Sums] = {}

    def __reduce__(self) -> tuple:
        """Travel empty: what was finished is in the receipts, and what was collected stays in its process."""
        return (Checksums, ())

    def add(self, name: str, tensor: Tensor) -> None:
        """Remember the sums of one tensor; nothing waits for the device."""
        found = slice_of(tensor)
        if found is not None and (entry := self._of_stack(found.stack)) is not None:
            self._note(name, entry, found.index)
        else:
            self._note(name, self._sums(tensor.unsqueeze(0)), 0)

    def add_stack(self, names: Sequence[str | None], stack: Tensor) -> None:
        """Do what `add` does for the slices of a stack.

        Args:
            names: of its slices; None for one that is not of interest.
            stack: "slices …".
        """
        entry = self._of_stack(stack)
        for index, name in enumerate(names):
            if name is not None and entry is not None:
                self._note(name, entry, index)
            elif name is not None:
                self.add(name, stack[index])

    def _note(self, name: str, entry: _Entry, index: int) -> None:
        self._places[name] = entry, index
        if self._non_finite is None and entry.bad is not None and entry.bad[index]:
            self._non_finite = name

    def _of_stack(self, stack: Tensor) -> _Entry | None:
        """Return the sums of a stack, taken now or before; None where it was written to since."""
        version = -1 if stack.is_inference() else stack._version  # a tensor under inference mode counts no writes
        if stack not in self._stacks:
            self._stacks[stack] = version, self._sums(stack)
        taken, entry = self._stacks[stack]
        return entry if taken == version else None

    def _sums(self, stack: Tensor) -> _Entry:
        """Take and return the sums over rows and columns of the slices of a stack."""
        laid, device = Matrices.of(stack), stack.device
        shape = laid.count, laid.rows, laid.columns
        if laid.width == 8 and dispatch.available(stack, "checksum"):
            from lit_qrl.receipts.checksum_triton import Sums

            if device not in self._fused:
                self._fused[device] = Sums(device)
            entry = _Entry(self._fused[device].of(laid.stack, *shape, laid.step), *shape)
        else:
            bits, bad = laid.bits(), torch.zeros(laid.count, dtype=torch.bool, device=device)
            if stack.is_floating_point() and stack.numel():
                bad = _not_finite(stack.detach().flatten(1) if stack.ndim > 1 else stack.detach().unsqueeze(1))
            parts = bits.sum(dim=2, dtype=torch.int64), bits.sum(dim=1, dtype=torch.int64), bad.long().unsqueeze(1)
            entry = _Entry(torch.cat(parts, dim=1).flatten(), *shape)
            entry.bad = bad.tolist() if device.type == "cpu" else None
        self._entries[device].append(entry)
        return entry

    def first_non_finite(self, wait: bool = True) -> str | None:
        """Return a name whose tensor holds NaN or infinity, the first added if there are more, or None.

        Args:
            wait: ask the accelerators too, which the host waits for; otherwise what was found on the CPU counts alone.
        """
        if not wait:
            return self._non_finite
        return next((name for name, (_, finite) in self.finish().items() if not finite), None)

    def finish(self) -> dict[str, tuple[int, bool]]:
        """Return (checksum, finite) by name; the host waits for what is new since the last call alone."""
        for device, entries in self._entries.items():
            if any(entry.sums is None for entry in entries):
                _finish(entries, device)
        known = ((name, entry.sums, entry.bad, index) for name, (entry, index) in self._places.items())
        return {name: (sums[index], not bad[index]) for name, sums, bad, index in known if sums and bad}


def _finish(entries: Sequence[_Entry], device: torch.device) -> None:
    """Bring the sums of a device's entries, and what of them is not finite, to the host in one transfer."""
    ends = accumulate(len(entry.numbers) for entry in entries)
    groups = groupby(zip(entries, ends, strict=True), lambda pair: pair[1] // AT_ONCE)
    made = [_summed([entry for entry, _ in group], device) for _, group in groups]
    values, bad = map(iter, torch.cat(made, dim=1).tolist())
    for entry in entries:
        entry.sums = list(islice(values, entry.count))
        entry.bad = [number > 0 for number in islice(bad, entry.count)]


def _summed(entries: Sequence[_Entry], device: torch.device) -> Tensor:
    """Return the sums of entries' slices, and what is above 0 where one is not finite: "2 slices"."""
    flat = torch.cat([entry.numbers for entry in entries])
    told = [(entry.count, entry.rows, entry.columns) for entry in entries]
    shapes, (counts, *most) = torch.tensor(told, device=device), zip(*told, strict=True)
    count, (high, wide) = sum(counts), map(max, most)
    rows, columns = (shapes[:, i].repeat_interleave(shapes[:, 0], output_size=count) for i in (1, 2))
    each = rows + columns + 1
    ends = each.cumsum(0)
    owner = torch.arange(count, device=device).repeat_interleave(each, output_size=len(flat))
    row = torch.arange(len(flat), device=device) - (ends - each)[owner]
    column = row - rows[owner]
    last = torch.where(column < columns[owner], column + high, high + wide)
    # the weights of all rows, of all columns, and 0 of what says that a slice is not finite
    of_rows, of_columns = position_weights(0, high, device), position_weights(COLUMN_OFFSET, wide, device)
    weights = torch.cat([of_rows, of_columns, of_rows.new_zeros(1)])
    terms = scrambled(flat * weights[torch.where(column < 0, row, last)])
    sums = torch.zeros(count, dtype=torch.int64, device=device).index_add_(0, owner, terms)
    return torch.stack([sums, flat[ends - 1]])


@lru_cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def _not_finite(rows: Tensor) -> Tensor:
    """Return for each row whether a number in it is NaN or infinity."""
    if rows.element_size() > 1:
        # `aminmax` along a dimension is ten times slower on a CPU
        low, high = (one.view(1) for one in torch.aminmax(rows)) if len(rows) == 1 else (rows.amin(1), rows.amax(1))
        return ~(low.isfinite() & high.isfinite())
    # NaN is a code with all seven lower bits set in E4M3, which has no infinity, and the last code in E8M0.
    nan_codes = {torch.float8_e4m3fn: 0x7F, torch.float8_e8m0fnu: 0xFF}
    if rows.dtype not in nan_codes:
        return ~rows.float().isfinite().all(dim=1)
    last = nan_codes[rows.dtype]
    return rows.view(torch.uint8).bitwise_and(last).amax(dim=1) == last
