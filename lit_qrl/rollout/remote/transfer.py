"""How published tensors reach another process: by memory that both see, of host or GPU, by a group, or the connection.

A chunk of tensors is packed once for all servers that take it the same way, and unpacked into tensors of the receiver's
own before it is acknowledged; then the sender may use the memory again. Memory that both see is opened once and stays:
to open a GPU's takes a driver tens of milliseconds, longer than a chunk is on its way.
"""

import io
import mmap
import os
import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal

import torch
from torch import Tensor

from lit_qrl.rollout.remote.group import Group
from lit_qrl.run.torch_settings import fixed_segments

Way = Literal["memory", "ipc", "socket", "collective", "nccl"]
CHUNK = 64 * 2**20
"""Bytes after which a chunk is sent."""
SLOTS = 2
"""Chunks under way: one is packed while the one before is taken."""
ALIGNED = 64
PROBE = b"the engine's server reads this"

Named = tuple[str, Tensor]
Header = list[tuple[str, torch.dtype, tuple[int, ...], int]]
"""Of each tensor name, dtype, shape, and where it begins."""
Hold = Callable[[int], Tensor]
"""From a number of bytes to memory for them."""


class SharedMemory:
    """Memory that another process of this host can map by its name; nothing of it is left when its owner ends.

    Args:
        size: in bytes, at first; it grows.
    """

    def __init__(self, size: int = 0) -> None:
        self._file, self._map, self.size = -1, None, 0
        if size:
            self.reserve(size)

    def reserve(self, size: int) -> None:
        """Make it at least so large; whoever has it open opens it again when it grows."""
        if size <= self.size:
            return
        if self._file < 0:
            self._file = os.memfd_create("lit-qrl-publish")
        # The same file grows: the name of another could be one that a receiver has open already.
        os.ftruncate(self._file, size)
        self._unmap()
        self._map, self.size = mmap.mmap(self._file, size), size

    @property
    def name(self) -> str:
        """By which another process of this user opens it."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    @property
    def bytes(self) -> Tensor:
        """All of it, as a tensor of bytes."""
        assert self._map is not None
        return torch.frombuffer(self._map, dtype=torch.uint8)

    def close(self) -> None:
        """Give it back."""
        self._unmap()
        if self._file >= 0:
            os.close(self._file)
        self._file, self.size = -1, 0

    def _unmap(self) -> None:
        if self._map is not None:
            with suppress(BufferError):  # a tensor still looks at it; then it goes with that
                self._map.close()
        self._map = None

    def settle(self) -> None:
        """Return when what was written can be read by another process."""


class DeviceMemory:
    """Memory of a GPU that other processes of this host open by its handle.

    Args:
        device: whose memory it is.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.name, self.size = device, b"", 0
        self._held: Tensor | None = None
        self._pool: Any = None

    def reserve(self, size: int) -> None:
        """Make it at least so large; what was in it is gone when it grows."""
        if size <= self.size:
            return
        self.close()
        with fixed_segments(self.device) as self._pool:
            self._held, self.size = torch.empty(size, dtype=torch.uint8, device=self.device), size
        self.name = handle(self._held)

    @property
    def bytes(self) -> Tensor:
        """All of it, as a tensor of bytes."""
        assert self._held is not None
        return self._held

    def settle(self) -> None:
        """Return when what was written can be read by another process."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        """Give it back."""
        self._held, self.name, self.size = None, b"", 0
        self._pool = None  # after what was of it


Memory = SharedMemory | DeviceMemory


def handle(tensor: Tensor) -> bytes:
    """Return what another process of this host opens the memory of a tensor by, with `opened`."""
    from multiprocessing.reduction import ForkingPickler

    buffer = io.BytesIO()
    ForkingPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(tensor)
    return buffer.getvalue()


def opened(name: str | bytes, size: int) -> Tensor:
    """Return memory of another process as a tensor of bytes.

    Args:
        name: of memory of the host, or a `handle`.
        size: in bytes.

    Raises:
        OSError: where it is on another host, or another user's.
    """
    if isinstance(name, bytes):
        return pickle.loads(name)
    with open(name, "r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)


class Mapped:
    """What a receiver has open of a sender's memory: the pieces that it read last, as many as are under way at once."""

    def __init__(self) -> None:
        self._maps: dict[tuple[str | bytes, int], Tensor] = {}

    def bytes(self, name: str | bytes, size: int) -> Tensor:
        """Return memory of another process as a tensor of bytes; raises as `opened` does."""
        held = self._maps.pop((name, size), None)
        self._maps[name, size] = opened(name, size) if held is None else held
        while len(self._maps) > SLOTS:  # a piece that has grown since is another
            del self._maps[next(iter(self._maps))]
        return self._maps[name, size]


class _HostPickler(pickle.Pickler):
    """Writes tensors as their bytes, wherever they lie; torch's own way shares memory with children alone."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            return _as_tensor, (raw(obj).cpu().numpy().tobytes(), obj.dtype, tuple(obj.shape))
        return NotImplemented


def dumps(value: Any) -> bytes:
    """Return a message; what `pickle.loads` makes of it has its tensors in the host's memory.

    >>> pickle.loads(dumps({"codes": torch.ones(2, dtype=torch.float8_e4m3fn)}))["codes"].dtype
    torch.float8_e4m3fn
    """
    buffer = io.BytesIO()
    _HostPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def _as_tensor(held: bytes, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    if not held:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(held), dtype=torch.uint8).view(dtype).reshape(shape)


def probe() -> SharedMemory:
    """Return memory with known contents, by which a server tells whether it sees the run's."""
    memory = SharedMemory(mmap.PAGESIZE)
    memory.bytes[: len(PROBE)] = torch.frombuffer(bytearray(PROBE), dtype=torch.uint8)
    return memory


def sees(name: str) -> bool:
    """Return whether memory named by another process is that of `probe`."""
    try:
        held = Mapped().bytes(name, mmap.PAGESIZE)[: len(PROBE)]
    except (OSError, ValueError):
        return False
    return bytes(held.tolist()) == PROBE


def size_of(tensor: Tensor) -> int:
    """Return a tensor's bytes."""
    return tensor.numel() * tensor.element_size()


def layout(tensors: Sequence[Named]) -> tuple[Header, int]:
    """Return where each tensor begins in a chunk, and the chunk's bytes.

    >>> layout([("a", torch.zeros(3)), ("b", torch.zeros(2))])
    ([('a', torch.float32, (3,), 0), ('b', torch.float32, (2,), 64)], 128)
    """
    header, place = [], 0
    for name, tensor in tensors:
        header.append((name, tensor.dtype, tuple(tensor.shape), place))
        place += -(-size_of(tensor) // ALIGNED) * ALIGNED
    return header, place


def raw(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, where it lies.

    >>> raw(torch.ones(1))
    tensor([  0,   0, 128,  63], dtype=torch.uint8)
    """
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def pack(tensors: Sequence[Named], way: Way, memory: Memory | None = None) -> tuple[Any, list[Any]]:
    """Return the message of a chunk, and the bytes that follow it over the connection.

    Args:
        tensors: names and tensors, which must stay until the chunk is acknowledged.
        way: through which they go.
        memory: that both processes see, of the host for `memory` and of the GPU for `ipc`.
    """
    header, size = layout(tensors)
    if way == "socket":
        return (way, header, size), [raw(tensor).cpu().numpy() for _, tensor in tensors if tensor.numel()]
    if way in ("collective", "nccl"):  # the bytes follow by the group, once for all
        return (way, header, size), []
    assert memory is not None
    memory.reserve(max(size, CHUNK))
    lay(tensors, header, memory.bytes)
    memory.settle()
    return (way, memory.name, memory.size, header, size), []


def whole_bytes(tensors: Sequence[Named], way: Way) -> Tensor:
    """Return the bytes of a chunk as its header has them, where the way takes them from.

    Args:
        tensors: names and tensors.
        way: `nccl` sends from the tensors' device, `collective` from the host.
    """
    header, size = layout(tensors)
    device = tensors[0][1].device if way == "nccl" else torch.device("cpu")
    held = torch.empty(size, dtype=torch.uint8, device=device)
    lay(tensors, header, held)
    return held


def lay(tensors: Sequence[Named], header: Header, held: Tensor) -> None:
    """Write the bytes of tensors into memory, where their header has them."""
    for (_, tensor), (_, _, _, place) in zip(tensors, header, strict=True):
        held[place : place + size_of(tensor)].copy_(raw(tensor))


def unpack(
    message: Any,
    following: Sequence[Any],
    mapped: Mapped,
    device: torch.device,
    group: Group | None = None,
    hold: Hold | None = None,
) -> list[Named]:
    """Return the tensors of a chunk as copies.

    Args:
        message: of `pack`.
        following: the bytes that came with it.
        mapped: of this receiver.
        device: where the engine computes.
        group: over which bytes come.
        hold: from a size to the memory that the copies are in; by default on `device`.
    """
    way, *where, header, size = message
    whole = torch.empty(size, dtype=torch.uint8, device=device) if hold is None else hold(size)
    if way == "socket":
        filled = [one for one in header if _bytes(one[1], one[2])]
        for (_, _, _, place), piece in zip(filled, following, strict=True):
            whole[place : place + len(piece)].copy_(torch.frombuffer(piece, dtype=torch.uint8))
    elif way in ("collective", "nccl"):
        assert group is not None
        there = whole if whole.is_cuda == (way == "nccl") else torch.empty_like(whole, device=_of_group(way, device))
        group.broadcast(there)
        if there is not whole:
            whole.copy_(there)
    else:
        whole.copy_(mapped.bytes(*where)[:size])  # in one, whatever the number of tensors
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return [
        (name, whole[place : place + _bytes(dtype, shape)].view(dtype).reshape(shape))
        for name, dtype, shape, place in header
    ]


def _of_group(way: Way, device: torch.device) -> torch.device:
    """Return where a group's bytes arrive."""
    return device if way == "nccl" else torch.device("cpu")


def _bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
