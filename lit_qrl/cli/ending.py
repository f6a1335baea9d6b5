"""The end of a run: what lies on a GPU stays there, since the process ends too; and with what it would go on."""

import shlex
from collections.abc import Callable, Sequence
from functools import partial

from lightning.pytorch.strategies import Strategy


def leave_in_place(strategy: Strategy) -> None:
    """Let the strategy's teardown take neither weights nor optimizer states to the host.

    Lightning does so for what a program does next with its module. A command does nothing, and a user would wait for
    57 GiB at 7B with all weights trained.

    Args:
        strategy: of a Trainer that ends with its process.
    """
    strategy.teardown = partial(_teardown, strategy, strategy.teardown)


def _teardown(strategy: Strategy, teardown: Callable[[], None]) -> None:
    module, optimizers = strategy.lightning_module, strategy.optimizers
    strategy.optimizers = []
    if module is not None:
        module.cpu = lambda: module  # pyright: ignore[reportAttributeAccessIssue]
    try:
        teardown()
    finally:  # what a run stopped for is told after this, with what its learner held
        strategy.optimizers = optimizers
        if module is not None:
            del module.cpu


def again(arguments: Sequence[str]) -> str:
    """Return the command line with which an interrupted run goes on."""
    words = [word for word in arguments if not word.startswith("--ckpt_path=")]
    if "--ckpt_path" in words:
        at = words.index("--ckpt_path")
        del words[at : at + 2]
    return shlex.join(["lit-qrl", *words, "--ckpt_path", "last"])
