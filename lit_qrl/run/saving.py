"""Checkpoint files written in the background from a staged copy: whole or not at all, one copy in the host's memory."""

import errno
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_crc32_options, set_crc32_options
from torch.utils import _pytree as pytree

from lit_qrl.errors import StoppedError

_staging: ContextVar[bool] = ContextVar("staging", default=False)


class Later:
    """What a staged checkpoint will hold in a place, known when it is written.

    Args:
        made: returns it, in the thread that writes.
    """

    def __init__(self, made: Callable[[], Any]) -> None:
        self.made = made


def when_written(made: Callable[[], Any]) -> Any:
    """Return what a checkpoint holds in a place: at once, or a `Later` where it is written in the background.

    >>> when_written(lambda: 2)
    2
    """
    return Later(made) if _staging.get() else made()


@contextmanager
def staging() -> Iterator[None]:
    """Say that the checkpoint which is made meanwhile goes to `CheckpointFiles.save`."""
    token = _staging.set(True)
    try:
        yield
    finally:
        _staging.reset(token)


class CheckpointFiles:
    """Writes one checkpoint at a time, in a thread of its own.

    `save` copies every tensor into buffers on the host, which the next save uses again, and returns; the thread writes
    the file beside its place, forces it to the disk, and moves it there, so that whoever reads finds the previous
    checkpoint or the new one. Further targets are names of the same file where the disk can give one more than one. An
    error of the thread is raised by the next `save` or `wait`.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._target = Path()

    def save(self, checkpoint: dict[str, Any], targets: Sequence[Path]) -> None:
        """Stage a checkpoint and begin to write it to every target, after the one before it is written.

        Args:
            checkpoint: anything that `torch.save` takes; its tensors may change as soon as this returns. The thread
                puts in what is to come later.
            targets: the files.

        Raises:
            StoppedError: when the checkpoint before could not be written.
        """
        self.wait()
        staged = self._stage(checkpoint)
        self._thread = threading.Thread(target=self._write, args=(staged, list(targets)), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Return when everything is written.

        Raises:
            StoppedError: when it could not be.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise StoppedError(_sentence(self._target, error)) from error

    @property
    def writing(self) -> bool:
        """True while a file is being written."""
        return self._thread is not None and self._thread.is_alive()

    def _stage(self, checkpoint: dict[str, Any]) -> Any:
        """Return the checkpoint with every tensor in a buffer on the host."""
        leaves, structure = pytree.tree_flatten(checkpoint)
        free, self._buffers = self._buffers, defaultdict(list)
        copies: dict[tuple[Any, ...], Tensor] = {}
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                key = leaf.data_ptr(), leaf.dtype, leaf.size(), leaf.stride()
                if key not in copies or not leaf.numel():  # tied weights are one tensor in the file too
                    copies[key] = self._copy(leaf.detach(), free)
                leaves[index] = copies[key]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return pytree.tree_unflatten(leaves, structure)

    def _copy(self, tensor: Tensor, free: dict[tuple[Any, ...], list[Tensor]]) -> Tensor:
        on_gpu = tensor.device.type == "cuda"
        kind = tensor.dtype, tensor.shape, on_gpu
        found = free[kind].pop() if free.get(kind) else None
        if found is None:
            found = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
        found.copy_(tensor, non_blocking=on_gpu)
        self._buffers[kind].append(found)
        return found

    def _write(self, staged: Any, targets: list[Path]) -> None:
        for target in targets:
            self._target = target
            partial = target.with_name(f".{target.name}.partial")
            try:
                if target == targets[0] or not _same_file(targets[0], partial):
                    staged = pytree.tree_map(lambda leaf: leaf.made() if isinstance(leaf, Later) else leaf, staged)
                    with partial.open("wb") as file, _without_sums():
                        torch.save(staged, file)
                        file.flush()
                        os.fsync(file.fileno())
                os.replace(partial, target)
                _sync_folder(target.parent)
            except BaseException as error:
                self._error = error
                with suppress(OSError):
                    partial.unlink(missing_ok=True)
                return


@contextmanager
def _without_sums() -> Iterator[None]:
    """Leave out the sums that `torch.load` does not look at: the run would stand still while they are made."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def _same_file(written: Path, name: Path) -> bool:
    """Give a file that is never written again, only replaced, another name; return whether the disk can."""
    name.unlink(missing_ok=True)
    try:
        os.link(written, name)
    except OSError:  # file systems without hard links, or with as many as they allow
        return False
    return True


def _sync_folder(folder: Path) -> None:
    """Force the names in a folder to the disk, where the system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _sentence(target: Path, error: BaseException) -> str:
    # torch's own writer turns an error of the file into one of its own
    error = error.__context__ if isinstance(error.__context__, OSError) else error
    what = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "Free some space" if full or "failed writing" in str(error) else "See that the folder can be written"
    kept = f"The one before it is whole: {target}." if target.exists() else "No checkpoint had been written before it."
    return f"A checkpoint could not be written: {what}. {kept} {remedy}, and go on with --ckpt_path last."


class Cadence:
    """How often to save so that it costs at most a share of the time.

    Args:
        share: of the wall time.

    >>> cadence = Cadence(0.02)
    >>> cadence.due(10.0)
    True
    >>> cadence.saved(10.0, 11.0)
    >>> cadence.due(60.0), cadence.due(61.0)
    (False, True)
    """

    def __init__(self, share: float = 0.02) -> None:
        self.share = share
        self._cost = 0.0
        self._last: float | None = None

    def due(self, now: float | None = None) -> bool:
        """Return whether a save of what the last one cost, in seconds, is within the share."""
        now = time.perf_counter() if now is None else now
        return self._last is None or now - self._last >= self._cost / self.share

    def saved(self, began: float, ended: float) -> None:
        """Note that a save kept the run waiting from `began` to `ended`, in seconds."""
        self._cost, self._last = ended - began, ended
