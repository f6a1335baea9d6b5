"""Learning-rate schedules over the whole run."""

import math
from collections.abc import Callable
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from lit_qrl.errors import ConfigError

Schedule = Literal["constant", "linear", "cosine"]


def schedule_factor(step: int, steps: int, schedule: Schedule, warmup: float) -> float:
    """Return the factor of the learning rate at an optimizer step.

    Linear warm-up over the first `warmup` share of the run, then `constant`, or a decay to zero at the last step.

    Args:
        step: optimizer steps taken so far.
        steps: optimizer steps of the whole run.
        schedule: form of the decay.
        warmup: share of the run, in [0, 1).

    >>> schedule_factor(0, 100, "cosine", 0.05), schedule_factor(5, 100, "cosine", 0.05)
    (0.2, 1.0)
    """
    rising = math.ceil(warmup * steps)
    if step < rising:
        return (step + 1) / rising
    if schedule == "constant":
        return 1.0
    x = min((step - rising) / max(steps - rising, 1), 1.0)
    return 1.0 - x if schedule == "linear" else (1.0 + math.cos(math.pi * x)) / 2


def scheduled(
    optimizer: Optimizer,
    steps: int,
    schedule: Schedule = "constant",
    warmup: float = 0.0,
    own: Callable[[Optimizer], Any] | None = None,
) -> dict[str, Any]:
    """Return a scheduler and when Lightning steps it: every optimizer step.

    Args:
        optimizer: whose learning rate it sets.
        steps: optimizer steps of the whole run.
        schedule: form of the decay.
        warmup: share of the run, in [0, 1).
        own: makes another scheduler.

    Raises:
        ConfigError: for a scheduler that ends before the run, or that waits on a plateau.

    >>> import torch
    >>> scheduled(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), 10)["interval"]
    'step'
    """
    if own is None:
        own = lambda made: LambdaLR(made, lambda step: schedule_factor(step, steps, schedule, warmup))  # noqa: E731
    scheduler = own(optimizer)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            "model.lr_scheduler waits on the plateau of a metric.",
            expected="a scheduler that is stepped with every optimizer step",
            given="ReduceLROnPlateau",
            remedy="Set model.lr_schedule to linear or cosine, or EarlyStopping to end the run on a plateau.",
        )
    ends = getattr(scheduler, "total_steps", None)  # of OneCycleLR, which raises behind its end
    if isinstance(ends, int) and ends < steps:
        raise ConfigError(
            f"model.lr_scheduler ends before the run, which takes {steps} optimizer steps.",
            expected=f"total_steps of at least {steps}",
            given=ends,
            remedy="Raise it.",
        )
    return {"scheduler": scheduler, "interval": "step"}
