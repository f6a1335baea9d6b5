"""A frozen copy of the learner's network, for a penalty on the distance to it."""

from collections.abc import Callable
from typing import Any

from torch import nn


class Reference(nn.Module):
    """A network that scores as a module of its own, so that its weights may be divided over processes.

    Args:
        network: Hugging Face's.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, scores: Callable[..., Any], *arguments: Any) -> Any:
        """Return `scores(network, …)`."""
        return scores(self.network, *arguments)
