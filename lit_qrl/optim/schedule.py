"""Learning-rate schedules over the whole run."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
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
    evaluated_every: int | None = None,
) -> dict[str, Any]:
    """Return a scheduler and when Lightning steps it: every optimizer step.

    One that waits on a plateau is stepped when its metric is new: every iteration, or where that is evaluated.

    Args:
        optimizer: whose learning rate it sets.
        steps: optimizer steps of the whole run.
        schedule: form of the decay.
        warmup: share of the run, in [0, 1).
        own: makes another scheduler.
        evaluated_every: iterations from one evaluation to the next.

    Raises:
        ConfigError: for a scheduler that ends before the run, or that waits on a plateau of nothing.

    >>> import torch
    >>> scheduled(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), 10)["interval"]
    'step'
    """
    if own is None:
        own = lambda made: LambdaLR(made, lambda step: schedule_factor(step, steps, schedule, warmup))  # noqa: E731
    scheduler = own(optimizer)
    if isinstance(scheduler, ReduceLROnPlateau):
        monitor = getattr(scheduler, "monitor", None)
        if monitor is None:
            raise ConfigError(
                "model.lr_scheduler waits on a plateau of no metric.",
                expected="lightning.pytorch.cli.ReduceLROnPlateau with a monitor, a column of metrics.csv",
                given="torch.optim.lr_scheduler.ReduceLROnPlateau",
                remedy="Set model.lr_scheduler to the former, and its monitor to reward/mean.",
            )
        every = evaluated_every or 1 if monitor.startswith("val/") else 1
        return {"scheduler": scheduler, "interval": "epoch", "frequency": every, "monitor": monitor}
    ends = getattr(scheduler, "total_steps", None)  # of OneCycleLR, which raises behind its end
    if isinstance(ends, int) and ends < steps:
        raise ConfigError(
            f"model.lr_scheduler ends before the run, which takes {steps} optimizer steps.",
            expected=f"total_steps of at least {steps}",
            given=ends,
            remedy="Raise it.",
        )
    return {"scheduler": scheduler, "interval": "step"}


@contextmanager
def plateaus_seen(trainer: Any) -> Iterator[None]:
    """Within it, at the end of an epoch, schedules that wait on a plateau have seen that epoch already.

    Lightning lets them see it after the callbacks, and does not repeat that when a run goes on from what a callback
    saved then: the run would miss one observation.

    Args:
        trainer: Lightning's, whose callbacks are at the end of an epoch.
    """
    waiting = [config.scheduler for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
    if not waiting:
        yield
        return
    loop = trainer.fit_loop.epoch_loop
    before = deepcopy(loop.scheduler_progress.state_dict())
    schedules = [
        (one, deepcopy(one.state_dict()), [group["lr"] for group in one.optimizer.param_groups]) for one in waiting
    ]
    try:
        loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        yield
    finally:
        loop.scheduler_progress.load_state_dict(before)
        for one, state, rates in schedules:
            one.load_state_dict(state)
            for group, rate in zip(one.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
