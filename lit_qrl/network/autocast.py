"""Computing under autocast where weights are read many times: each is cast once, not at every use."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def autocast_input(x: Tensor) -> Tensor:
    """Return `x` in the autocast dtype of its device, as a plain linear layer would cast it."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


class _CastOnce:
    """The forward pass of a linear layer whose weight and bias are cast once: the numbers are those of autocast.

    Args:
        layer: whose weight may be replaced, as by a publish between two steps, but not written to.
    """

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer
        self._of: tuple[object, ...] = (None, None, None)
        self._cast: tuple[Tensor, Tensor | None]

    def __call__(self, input: Tensor) -> Tensor:
        x, weight, bias = autocast_input(input), self.layer.weight, self.layer.bias
        of = weight, bias, x.dtype
        if any(one is not other for one, other in zip(of, self._of, strict=True)):
            self._of = of
            self._cast = weight.detach().to(x.dtype), None if bias is None else bias.detach().to(x.dtype)
        return F.linear(x, *self._cast)


@contextmanager
def computing_in(network: nn.Module, device: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Let a network that is not trained compute under autocast in a dtype, or under none, whatever the caller is under.

    torch keeps what it casts for weights that have gradients alone, and would cast all others at every use. What is
    kept here takes the memory of the linear layers in that dtype, and is freed at the end.

    Args:
        network: whose weights are not written to meanwhile.
        device: its kind.
        dtype: of the products; None computes in the dtypes of the weights.
    """
    layers: list[nn.Linear] = []
    if dtype is not None:
        plain = (part for part in network.modules() if type(part) is nn.Linear and "forward" not in vars(part))
        layers = [layer for layer in plain if layer.weight.dtype not in (dtype, torch.float64)]
    for layer in layers:
        layer.forward = _CastOnce(layer)
    try:
        with torch.autocast(device, dtype or torch.bfloat16, enabled=dtype is not None, cache_enabled=False):
            yield
    finally:
        for layer in layers:
            del layer.forward
