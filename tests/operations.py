"""Counts what a device would have to launch."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# they launch nothing
VIEWS = ("view", "unbind", "select", "slice", "as_strided", "unsqueeze", "detach", "alias", "expand", "t", "transpose")
FEW = 8
"""A shape, say, is no work for a device."""


class _Counting(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sizes = [one.numel() for one in tree_leaves(args) if isinstance(one, torch.Tensor)]
        self.count += func._schema.name.removeprefix("aten::") not in VIEWS and max(sizes, default=0) > FEW
        return func(*args, **(kwargs or {}))


def counted(run: Callable[[], Any]) -> int:
    """Return how many of torch's operations on more than a few numbers a function calls, views aside."""
    with _Counting() as operations:
        run()
    return operations.count
