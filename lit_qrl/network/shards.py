"""Parameters of which this process holds a part: whole again, one at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed import all_gather
from torch.distributed.tensor import DTensor, distribute_tensor

gather_into: Any = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)  # until torch 2.12


def is_sharded(module: nn.Module) -> bool:
    """Return whether processes share the parameters of a module.

    >>> is_sharded(nn.Linear(2, 2))
    False
    """
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """Return a tensor with all its parts; every process must ask for the same tensors in the same order.

    >>> import torch
    >>> whole(torch.ones(1))
    tensor([1.])
    """
    if not isinstance(tensor, DTensor):
        return tensor
    size, part = tensor.device_mesh.size(), tensor.to_local()
    # Of a single process the part is the whole: its memory must not be taken for that of a copy.
    if size == 1:
        return part.clone()
    if tensor.device_mesh.ndim > 1 or not tensor.placements[0].is_shard(0):
        return tensor.full_tensor()
    # What `full_tensor` does for parts of rows takes the host six times as long, and a publish asks for each tensor.
    rows = -(-tensor.shape[0] // size)
    if len(part) < rows:
        part = torch.cat([part, part.new_zeros(rows - len(part), *tensor.shape[1:])])
    found = part.new_empty(rows * size, *tensor.shape[1:])
    gather_into(found, part.contiguous(), group=tensor.device_mesh.get_group())
    return found[: tensor.shape[0]]


def own(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds: all of one that is not divided.

    >>> import torch
    >>> own(torch.ones(3)).numel()
    3
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_part(value: Tensor, like: Tensor) -> Tensor:
    """Return what this process holds of a whole tensor, divided as `like` is, on its device; nothing is sent.

    Args:
        value: the whole tensor, the same on all processes; one that is divided already comes back itself.
        like: a parameter; one that is not divided gives `value` itself, on its device.
    """
    if isinstance(value, DTensor):
        return value
    value = value.to(like.device)
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


class Divided(NamedTuple):
    """What a tensor was that `divided` took a part of.

    Args:
        shape: of the whole.
        dtype: of the whole.
        group: the processes.
    """

    shape: torch.Size
    dtype: torch.dtype
    group: Any

    def whole(self, part: Tensor) -> Tensor:
        """Return the tensor from the parts of all processes, which must ask for the same ones in the same order."""
        found = part.new_empty(part.numel() * self.group.size())
        all_gather(list(found.chunk(self.group.size())), part, group=self.group)
        return found[: self.shape.numel() * self.dtype.itemsize].view(self.dtype).view(self.shape)


def divided(tensor: Tensor, group: Any) -> tuple[Tensor, Divided]:
    """Return this process's equal part of a tensor's bytes, and how the tensor is had again; nothing is sent.

    Bytes, so that codes of any format travel, whatever a backend knows of their dtype.

    Args:
        tensor: one dimension or more, the same on all processes.
        group: the processes.
    """
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    size = -(-flat.numel() // group.size())
    part = flat.new_zeros(size)
    own_bytes = flat[group.rank() * size : (group.rank() + 1) * size]
    part[: own_bytes.numel()] = own_bytes
    return part, Divided(tensor.shape, tensor.dtype, group)


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Let a module hold its parameters whole inside; what is written to them then is lost.

    Args:
        module: a small one, such as a linear layer with its adapter.
    """
    kept: list[tuple[dict[str, Any], str, nn.Parameter]] = []
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if isinstance(parameter, DTensor):
                kept.append((part._parameters, name, parameter))
                part._parameters[name] = nn.Parameter(whole(parameter.detach()), parameter.requires_grad)
    try:
        yield
    finally:
        for parameters, name, parameter in kept:
            parameters[name] = parameter
