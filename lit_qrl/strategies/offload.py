"""Optimizer state that waits on the host while the device is needed for something else."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from lit_qrl.optim.masters import MasterWeights


class OffloadedState:
    """Moves the state of optimizers to host memory and back, always into the same host buffers.

    Buffers are pinned where there is a GPU, so that both ways run at the speed of the bus. Single numbers, such as
    step counts, stay where they are.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, str], Tensor] = {}
        self._homes: dict[tuple[int, str], torch.device] = {}

    @property
    def away(self) -> bool:
        """True between `to_host` and `to_device`."""
        return bool(self._homes)

    @torch.no_grad()
    def to_host(self, optimizers: Iterable[Optimizer]) -> int:
        """Return the bytes that were moved; a second call moves nothing."""
        moved = 0
        for parameter, state, name, tensor in _tensors(optimizers):
            key = id(parameter), name
            if key in self._homes:
                continue
            buffer = self._buffers.get(key)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty_like(tensor, device="cpu", pin_memory=torch.cuda.is_available())
                self._buffers[key] = buffer
            buffer.copy_(tensor, non_blocking=True)
            self._homes[key] = tensor.device
            state[name] = buffer
            moved += tensor.numel() * tensor.element_size()
        if moved and torch.cuda.is_available():
            torch.cuda.synchronize()  # before the memory is given to others
        return moved

    @torch.no_grad()
    def to_device(self, optimizers: Iterable[Optimizer]) -> None:
        """Move everything back to where it was; what was replaced in the meantime, by a restored checkpoint, stays."""
        for parameter, state, name, tensor in _tensors(optimizers):
            key = id(parameter), name
            home = self._homes.get(key)
            if home is not None and tensor is self._buffers[key]:
                state[name] = torch.empty_like(tensor, device=home).copy_(tensor, non_blocking=True)
        self._homes.clear()


def _tensors(optimizers: Iterable[Optimizer]) -> Iterator[tuple[Tensor, dict, str, Tensor]]:
    for outer in optimizers:
        for optimizer in (outer, outer.inner) if isinstance(outer, MasterWeights) else (outer,):
            for parameter, state in list(optimizer.state.items()):
                for name, value in list(state.items()):
                    if isinstance(value, Tensor) and value.numel() > 1:
                        yield parameter, state, name, value
