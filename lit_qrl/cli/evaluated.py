"""What `validate` and `test` say at their end: each accuracy with its interval."""

from collections.abc import Mapping
from typing import Any

from lit_qrl.aliases import METRICS
from lit_qrl.loop.evaluation import BOUNDS, is_bound


def told(metrics: Mapping[str, Any]) -> list[str]:
    """Return a line for each metric of an evaluation, an accuracy with its 95 % interval.

    Args:
        metrics: by name, as the Trainer has them; what carries a former name too is told once.

    >>> told({"val/accuracy": 0.3359375, "val/accuracy_ci_low": 0.27, "val/accuracy_ci_high": 0.4})
    ['val/accuracy  0.336  [0.270, 0.400]']
    """
    values = {name: float(value) for name, value in metrics.items() if name not in METRICS}
    shown = [name for name in values if not is_bound(name)]
    width = max(map(len, shown), default=0)
    return [f"{name:{width}}  {values[name]:.3f}{_interval(values, name)}" for name in shown]


def _interval(values: Mapping[str, float], name: str) -> str:
    low, high = (values.get(f"{name}{suffix}") for suffix in BOUNDS if suffix)
    return "" if low is None or high is None else f"  [{low:.3f}, {high:.3f}]"
