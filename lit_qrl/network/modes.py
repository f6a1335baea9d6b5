"""Training and evaluation mode of a network's modules, dropout happens in the first alone; and a pass's repetition."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Put all modules into evaluation mode, and each back into its own."""
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def train_without_dropout(network: nn.Module) -> None:
    """Put a network that is to be trained into evaluation mode, so that it computes in training as in scoring.

    That switches dropout off wherever it is: modules, arguments of functions, layers that are left out. Only modules
    with gradient checkpointing, which works in training mode alone, stay there, and their own rates become 0.

    Args:
        network: a Hugging Face model, an adapter inside or not.

    >>> layer = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).train()
    >>> train_without_dropout(layer)
    >>> layer[1].training
    False
    """
    network.eval()
    for module in network.modules():
        if vars(module).get("gradient_checkpointing"):
            module.training = True
            for name, value in list(vars(module).items()):
                if "drop" in name and isinstance(value, float):
                    setattr(module, name, 0.0)


class _Pass(threading.local):
    repeated = False


_pass = _Pass()  # of a thread: a GPU's backward pass, which computes layers again, has one of its own


@contextmanager
def repeating() -> Iterator[None]:
    """Tell modules that a layer is computed again, for what its backward pass reads: its output is not wanted."""
    before, _pass.repeated = _pass.repeated, True
    try:
        yield
    finally:
        _pass.repeated = before


def is_repeated() -> bool:
    """Return whether a layer is being computed again, in this thread."""
    return _pass.repeated
