"""Learning-rate schedules over the whole run."""

import math
from typing import Literal


def schedule_factor(step: int, steps: int, schedule: Literal["constant", "linear", "cosine"], warmup: float) -> float:
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
