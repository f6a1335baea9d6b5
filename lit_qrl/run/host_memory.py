"""Memory of the host that is handed out in pieces of exactly the size that is asked for, pinned or not."""

import torch
from torch import Tensor

SMALLEST, LARGEST = 2**20, 2**30
"""Bytes of a chunk, but where a tensor needs more."""
ALIGNED = 64


class HostMemory:
    """Hands out tensors that lie side by side in few chunks, the same memory again after `reset`.

    torch pins each tensor by itself and rounds its bytes up to a power of two: weights, low bits and AdamW's states of
    a model of 7 billion parameters so take 162 GiB instead of 85. Here they take 86: chunks are powers of two, each as
    large as all before it until they are the largest.

    Args:
        pinned: lock the pages, so that a GPU copies at the speed of the bus and without waiting.

    >>> memory = HostMemory(pinned=False)
    >>> a, b = (memory.like(torch.zeros(3, dtype=torch.float16)) for _ in range(2))
    >>> b.data_ptr() - a.data_ptr(), memory.bytes, b.untyped_storage().nbytes()
    (64, 1048576, 6)
    """

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self._chunks: list[Tensor] = []
        self._used: list[int] = []

    @property
    def bytes(self) -> int:
        """Of all chunks."""
        return sum(map(len, self._chunks))

    def reset(self) -> None:
        """Hand out everything again; what was handed out must not be read any more."""
        self._used = [0] * len(self._chunks)

    def like(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the same shape and dtype with a storage of its own, its numbers not set."""
        size = tensor.numel() * tensor.element_size()
        if not size:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        taken = -(-size // ALIGNED) * ALIGNED
        fits = (at for at, chunk in enumerate(self._chunks) if self._used[at] + taken <= len(chunk))
        if (at := next(fits, None)) is None:
            at, wanted = len(self._chunks), max(taken, min(max(self.bytes, SMALLEST), LARGEST))
            chunk = torch.empty(1 << (wanted - 1).bit_length(), dtype=torch.uint8, pin_memory=self.pinned)
            self._chunks.append(chunk)
            self._used.append(0)
        begin, self._used[at] = self._used[at], self._used[at] + taken
        # a view would be saved with all of its chunk
        piece = torch.frombuffer(self._chunks[at].numpy(), dtype=torch.uint8, count=size, offset=begin)
        return piece.view(tensor.dtype).view(tensor.shape)
