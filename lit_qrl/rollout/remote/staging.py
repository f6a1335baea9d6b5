"""Weights that come while the engine draws: a second set of them, which it takes when it stands still."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lit_qrl.rollout.remote.transfer import Hold, Named

SPARED = 2**30
"""Bytes of a GPU that are left free: beyond that, weights wait in the host's memory."""


class HalfSentError(RuntimeError):
    """A publish whose sender gave up before its end."""


class Staging:
    """Holds the chunks of one publish, as they were sent, in memory that is of nobody else.

    Args:
        device: of the engine, whose memory they take where there is room.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._number, self._chunks = -1, []
        self._used = self._had = 0
        self._stream: Any = None

    def begin(self, number: int) -> None:
        """Begin a publish; what was held of another is forgotten."""
        self._number, self._chunks, self._used = number, [], 0

    def take(self, number: int, unpack: Callable[[Hold], list[Named]]) -> None:
        """Hold one chunk more.

        Args:
            number: of the publish.
            unpack: from memory by size to the tensors in it.

        Raises:
            HalfSentError: for a chunk of a publish that was not begun, or is over.
        """
        if number != self._number:
            raise HalfSentError("A part of a publish came that was not begun.")
        with self._beside_the_engine():
            self._chunks.append(unpack(self._memory))

    def stream(self, number: int, count: int) -> Iterator[Named]:
        """Yield the tensors of a whole publish, once; each chunk is let go when the next is asked for.

        Args:
            number: of the publish.
            count: of its chunks.

        Raises:
            HalfSentError: where not all of it is here, before any is given.
        """
        held, found = self._number, len(self._chunks)
        chunks, self._chunks, self._number = self._chunks, [], -1
        if (held, found) != (number, count):
            raise HalfSentError(f"Of a publish of {count} parts {found if held == number else 0} are here.")
        return self._each(chunks)

    def _each(self, chunks: list[list[Named]]) -> Iterator[Named]:
        while chunks:
            tensors = chunks.pop(0)
            for place, (name, tensor) in enumerate(tensors):
                if tensor.is_cuda and place == 0:  # all of them are of one piece of memory, of another stream
                    tensor.record_stream(torch.cuda.current_stream(tensor.device))
                yield name, tensor.to(self.device, non_blocking=True)

    def close(self) -> None:
        """Hold nothing."""
        self.begin(-1)
        self._had = 0

    @contextmanager
    def _beside_the_engine(self) -> Iterator[None]:
        """Let copies not wait for what the engine computes."""
        if self.device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def _memory(self, size: int) -> Tensor:
        if self.device.type != "cuda":
            return torch.empty(size, dtype=torch.uint8)
        # What an earlier publish has let go is the allocator's, and no longer free to others.
        if self._used + size <= self._had or torch.cuda.mem_get_info(self.device)[0] >= size + SPARED:
            try:
                held = torch.empty(size, dtype=torch.uint8, device=self.device)
            except torch.OutOfMemoryError:
                pass
            else:
                self._used += size
                self._had = max(self._had, self._used)
                return held
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
