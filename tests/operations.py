"""Counts what a device would have to launch."""

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class _Counting(TorchDispatchMode):
    # views launch nothing
    views = (
        "view",
        "unbind",
        "select",
        "slice",
        "as_strided",
        "unsqueeze",
        "detach",
        "alias",
        "expand",
        "t",
        "transpose",
    )
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name.removeprefix("aten::") not in self.views
        return func(*args, **(kwargs or {}))


def counted(run: Callable[[], Any]) -> int:
    """Return how many of torch's operations, views aside, a function calls."""
    with _Counting() as operations:
        run()
    return operations.count
