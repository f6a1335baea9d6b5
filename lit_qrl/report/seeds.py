"""Runs that differ in nothing but their seed, as one: the mean of each metric, and a band around it."""

import json
import math
from collections.abc import Sequence
from typing import Any

from lit_qrl.report.run import Run, Series

NOT_SETTINGS = ("seed_everything", "ckpt_path", "resume_if_possible", "trainer.default_root_dir", "data.seed")
"""Settings in which two runs of one configuration may differ; a task's seed makes other problems, so it counts."""
BAND = "± one standard error of the mean over seeds"
"""What the band is, in words."""


class Seeds:
    """Several runs of one configuration, with what figures and tables ask of a `Run`.

    Args:
        runs: at least one.
    """

    events: tuple[dict[str, Any], ...] = ()
    """Those of single runs are not marked in the figures of several."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = list(runs)

    def series(self, name: str) -> Series:
        """Return the mean of a metric over the runs that have it, at the iterations that all of those have."""
        return self._columns(name)[0]

    def interval(self, name: str) -> tuple[Series, Series]:
        """Return the ends of the band around the mean, empty where a single run has the metric."""
        mean, spread = self._columns(name)
        if not spread:
            return Series(), Series()
        low = [m - e for m, e in zip(mean.values, spread.values, strict=True)]
        high = [m + e for m, e in zip(mean.values, spread.values, strict=True)]
        return Series(mean.iterations, low), Series(mean.iterations, high)

    def _columns(self, name: str) -> tuple[Series, Series]:
        every = [series for run in self.runs if (series := run.series(name))]
        if not every:
            return Series(), Series()
        values = [dict(zip(one.iterations, one.values, strict=True)) for one in every]
        shared = sorted(set.intersection(*(set(one) for one in values)))
        columns = [[one[i] for one in values] for i in shared]
        mean = Series(shared, [math.fsum(column) / len(column) for column in columns])
        if len(every) < 2:
            return mean, Series()
        return mean, Series(shared, [standard_error(column) for column in columns])

    def prefixed(self, prefix: str) -> list[str]:
        """Return the metrics whose name starts so, of any of the runs."""
        return sorted({name for run in self.runs for name in run.prefixed(prefix)})

    @property
    def benchmarks(self) -> dict[str, list[str]]:
        """By the name of each benchmark the metrics of its accuracies, of any of the runs."""
        return {name: metrics for run in self.runs for name, metrics in run.benchmarks.items()}

    @property
    def iterations(self) -> int:
        """Iterations of the longest run."""
        return max(run.iterations for run in self.runs)


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean, √(Σ (x − mean)² / (n − 1) / n).

    >>> round(standard_error([1.0, 2.0, 3.0]), 4)
    0.5774
    """
    n = len(values)
    mean = math.fsum(values) / n
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)


def by_configuration(runs: Sequence[Run]) -> list[list[int]]:
    """Return the positions of the runs, those of one configuration together, in the order of their first.

    Two runs are of one configuration when their `config.yaml` differ in seeds and places only. A run without a
    configuration stands alone.
    """
    groups: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        groups.setdefault(_identity(run) or f"alone {index}", []).append(index)
    return list(groups.values())


def _identity(run: Run) -> str:
    return json.dumps(_without(run.config, ""), sort_keys=True, default=str) if run.config else ""


def _without(value: Any, path: str) -> Any:
    if not isinstance(value, dict):
        return value
    inner = {str(key): (f"{path}.{key}".lstrip("."), item) for key, item in value.items()}
    return {key: _without(item, where) for key, (where, item) in inner.items() if where not in NOT_SETTINGS}
