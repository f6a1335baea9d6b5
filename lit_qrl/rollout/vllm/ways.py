"""How a publish's tensors reach workers in other processes: by files that both see, memory of a GPU, or NCCL.

What describes a part of a publish is JSON, and nothing of it is unpickled: tensors are bytes of a safetensors file, of
memory that CUDA's driver opens by its handle, or of a broadcast.
"""

import shutil
import socket
import tempfile
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from lit_qrl.errors import ConfigError, listed
from lit_qrl.run.folder import LOCK_FILE
from lit_qrl.run.torch_settings import fixed_segments

Named = tuple[str, Tensor]
Packed = dict[str, Any]
CHUNK = 64 * 2**20
"""Bytes after which a part is sent."""
ALIGNED = 64
MEMORY = Path("/dev/shm")
"""A folder in the host's memory."""
PARTS = f"lit-qrl-parts-{socket.gethostname()}-"
"""How this host's folders are called in which parts lie; each is locked by the process that made it, of which some file
systems tell no other host."""
SPARE = 16 * 2**20
"""Bytes that a part leaves free where it lies: vLLM and torch have files in the host's memory, too."""


def chunks(tensors: Iterator[Named], limit: int = CHUNK) -> Iterator[list[Named]]:
    """Yield a stream in parts of about `limit` bytes, each name once; a larger tensor is a part of its own.

    >>> [len(part) for part in chunks(iter([("a", torch.zeros(2)), ("b", torch.zeros(2)), ("c", torch.zeros(9))]), 16)]
    [2, 1]
    """
    part: dict[str, Tensor] = {}
    held = 0
    for name, tensor in tensors:
        if part and (held + tensor.nbytes > limit or name in part):
            yield list(part.items())
            part, held = {}, 0
        part[name] = tensor
        held += tensor.nbytes
    if part:
        yield list(part.items())


class Files:
    """Sends by safetensors files, which are gone when they were taken.

    Args:
        folder: that workers see under the same name; None is the host's memory, for those of this host, and its folder
            of temporary files for a part that finds no room there.
    """

    def __init__(self, folder: str | None = None) -> None:
        places = [Path(folder)] if folder else [*filter(Path.is_dir, [MEMORY]), Path(tempfile.gettempdir())]
        self.folders, self._locks = zip(*map(_own_folder, places), strict=True)
        self._count = 0

    def pack(self, part: Sequence[Named]) -> Packed:
        """Return the description of a part, whose tensors can be taken from now on.

        Raises:
            ConfigError: there is no room for it.
        """
        from safetensors.torch import save_file

        size = SPARE + sum(tensor.nbytes for _, tensor in part)
        folder = next((one for one in self.folders if shutil.disk_usage(one).free > size), None)
        if folder is None:
            free = (f"{shutil.disk_usage(one).free / 2**20:,.0f} MiB in {one.parent}" for one in self.folders)
            raise ConfigError(
                "There is no room for the files through which weights reach the servers.",
                expected=f"{size / 2**20:,.0f} MiB",
                given=listed(free),
                remedy="Free some, or set data.engine.folder to a folder that run and servers see.",
            )
        self._count += 1
        path = folder / f"{self._count}.safetensors"
        held = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in part}
        save_file(held, path)
        return {"file": str(path), "names": list(held)}

    def send(self, packed: Packed) -> None:
        """Do nothing: the file is there."""

    def taken(self, packed: Packed) -> None:
        """Give back what a part took: all workers have it."""
        Path(packed["file"]).unlink(missing_ok=True)

    def close(self) -> None:
        for folder, lock in zip(self.folders, self._locks, strict=True):
            shutil.rmtree(folder, ignore_errors=True)
            lock.release()


def _own_folder(place: Path) -> tuple[Path, FileLock]:
    """Return a new folder, locked where the file system has locks; what runs that were killed left there goes."""
    for left in place.glob(f"{PARTS}*"):
        with suppress(OSError, NotImplementedError, Timeout):
            if time.time() - left.stat().st_mtime > 60:  # a younger one may not be locked yet
                with FileLock(left / LOCK_FILE, timeout=0):
                    shutil.rmtree(left, ignore_errors=True)
    own = Path(tempfile.mkdtemp(prefix=PARTS, dir=place))
    lock = FileLock(own / LOCK_FILE, timeout=0)
    with suppress(OSError, NotImplementedError):
        lock.acquire()
    return own, lock


class DeviceMemory:
    """Sends through memory of the learner's GPU, which workers on the same host open once: two parts take turns.

    Args:
        seen_as: the number of that GPU among those that workers see.
    """

    def __init__(self, seen_as: int) -> None:
        self.seen_as = seen_as
        self._held: list[tuple[Tensor, list[Any], Any] | None] = [None, None]
        self._turn = 0

    def pack(self, part: Sequence[Named]) -> Packed:
        header, size = layout(part)
        device = next((one.device for _, one in part if one.is_cuda), torch.device("cuda"))
        memory, handle = self._memory(max(size, CHUNK), device)
        lay(part, header, memory)
        torch.cuda.current_stream(device).synchronize()
        return {"memory": handle, "header": header, "size": size}

    def _memory(self, size: int, device: torch.device) -> tuple[Tensor, list[Any]]:
        self._turn = 1 - self._turn
        found = self._held[self._turn]
        if found is None or found[0].nbytes < size:
            self._held[self._turn] = None
            with fixed_segments(device) as pool:
                memory = torch.empty(size, dtype=torch.uint8, device=device)
            shared: Any = memory.untyped_storage()
            told = [b64encode(one).decode() if isinstance(one, bytes) else one for one in shared._share_cuda_()]
            found = self._held[self._turn] = memory, [self.seen_as, *told[1:]], pool
        return found[:2]

    def send(self, packed: Packed) -> None:
        """Do nothing: the bytes are there."""

    def taken(self, packed: Packed) -> None:
        """Do nothing: the next part but one lies there."""

    def close(self) -> None:
        self._held = [None, None]


class Broadcast:
    """Sends once from the learner's GPU to those of all workers, by vLLM's communicator over NCCL.

    Args:
        address: of this host.
        port: where workers meet it.
        size: workers, and this process.
        device: of this process.
    """

    def __init__(self, address: str, port: int, size: int, device: torch.device) -> None:
        self.device = device
        self._group: Any = communicator(address, port, 0, size, device)
        self._bytes: Any = None

    def pack(self, part: Sequence[Named]) -> Packed:
        header, size = layout(part)
        self._bytes = torch.empty(size, dtype=torch.uint8, device=self.device)
        lay(part, header, self._bytes)
        return {"header": header, "size": size}

    def send(self, packed: Packed) -> None:
        self._group.broadcast(self._bytes, src=0, stream=torch.cuda.current_stream(self.device))
        torch.cuda.current_stream(self.device).synchronize()

    def taken(self, packed: Packed) -> None:
        self._bytes = None

    def close(self) -> None:
        self._bytes = None
        self._group = None


Sender = Files | DeviceMemory | Broadcast
"""What sends the parts of a publish to all workers."""


def communicator(address: str, port: int, rank: int, size: int, device: torch.device) -> Any:
    """Return vLLM's communicator of a learner and workers; it returns when all have met."""
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup

    return PyNcclCommunicator(StatelessProcessGroup.create(address, port, rank, size), device=device)


def receiver(group: Sequence[Any] | None, device: torch.device, rank: int) -> Callable[[Packed], Iterator[Named]]:
    """Return what a worker makes of descriptions: the tensors.

    Args:
        group: of a `Broadcast`: address, port, number of this server's first worker, and size; None for other ways.
        device: of the worker.
        rank: of the worker in its server.
    """
    broadcast = None
    if group is not None:
        address, port, first, size = group
        broadcast = communicator(address, port, first + rank, size, device)
    opened: dict[str, Tensor] = {}

    def unpacked(packed: Packed) -> Iterator[Named]:
        if "file" in packed:
            from safetensors import safe_open

            with safe_open(packed["file"], framework="pt") as held:
                for name in packed["names"]:
                    yield name, held.get_tensor(name).to(device)
            return
        whole = torch.empty(packed["size"], dtype=torch.uint8, device=device)
        if "memory" in packed:
            key = str(packed["memory"])
            if key not in opened:
                while len(opened) > 1:  # what has grown since lies elsewhere
                    del opened[next(iter(opened))]
                opened[key] = _opened(packed["memory"])
            whole.copy_(opened[key][: packed["size"]])
        else:
            assert broadcast is not None
            broadcast.broadcast(whole, src=0, stream=torch.cuda.current_stream(device))
        torch.cuda.current_stream(device).synchronize()  # then the sender may use its memory again
        for name, dtype, shape, place in packed["header"]:
            kind = getattr(torch, dtype)
            size = torch.Size(shape).numel() * kind.itemsize
            yield name, whole[place : place + size].view(kind).reshape(shape)

    return unpacked


def _opened(told: list[Any]) -> Tensor:
    """Return memory of another process's GPU by what its driver told of it, as bytes."""
    parts = [b64decode(one) if isinstance(one, str) else one for one in told]
    storage = torch.UntypedStorage._new_shared_cuda(*parts)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore


def layout(tensors: Sequence[Named]) -> tuple[list[list[Any]], int]:
    """Return name, dtype, shape and first byte of each tensor in a part, and the part's bytes.

    >>> layout([("a", torch.zeros(3)), ("b", torch.zeros(2))])
    ([['a', 'float32', [3], 0], ['b', 'float32', [2], 64]], 128)
    """
    header, place = [], 0
    for name, tensor in tensors:
        header.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), place])
        place += -(-tensor.nbytes // ALIGNED) * ALIGNED
    return header, place


def lay(tensors: Sequence[Named], header: Sequence[Sequence[Any]], held: Tensor) -> None:
    """Write the bytes of tensors into memory, where their header has them."""
    for (_, tensor), (*_, place) in zip(tensors, header, strict=True):
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        held[place : place + tensor.nbytes].copy_(flat)
