"""Where the wall time of a run went: the phases of its iterations, and what was outside of them."""

import math
from dataclasses import dataclass

from lit_qrl.report.run import Run, Series
from lit_qrl.report.seeds import Seeds

PHASES = {
    "publish": "publish",
    "generate": "generate",
    "reward": "reward",
    "rollout": "rollout, the rest",
    "sleep": "wait for the engine's sleep",
    "score": "score",
    "update": "update",
    "evaluate": "evaluate",
    "checkpoint": "checkpoint",
    "report": "report",
    "other": "other",
}
"""By their names under `time/`, in the order of an iteration, and what the page calls them; they add up to it."""
PUBLISHING = ("make", "load", "compare", "send", "await", "engine_wait", "engine_take", "engine_load")
"""Parts of a publish, the last three in the process of an engine apart."""
WITHIN = {
    "verify": "publish",
    **{f"publish_{part}": "publish" for part in PUBLISHING},
    "generate": "rollout",
    "reward": "rollout",
}
"""Phases that are a part of another."""
SMALLEST = 0.0005
"""Of a phase, the share of the whole under which it is not listed."""


@dataclass(frozen=True)
class Phase:
    """Seconds of one phase: in all, as a share of the whole, per iteration, and in the slowest one."""

    name: str
    seconds: float
    share: float
    mean: float | None = None
    most: float | None = None
    iteration: int | None = None


def phase_series(run: Run | Seeds, phase: str) -> Series:
    """Return a phase's own seconds over iterations: without those of the phases within it, never negative."""
    series = run.series(f"time/{phase}")
    values = dict(zip(series.iterations, series.values, strict=True))
    for inner, outer in WITHIN.items():
        if outer == phase and inner in PHASES:
            part = run.series(f"time/{inner}")
            for iteration, seconds in zip(part.iterations, part.values, strict=True):
                if iteration in values:
                    values[iteration] -= seconds
    return Series(list(values), [max(value, 0.0) for value in values.values()])


def takes_time(run: Run | Seeds, phase: str) -> bool:
    """Return whether a phase has a share of the iterations that can be seen."""
    whole = math.fsum(run.series("time/iteration").values)
    return math.fsum(phase_series(run, phase).values) > SMALLEST * whole


def where_time_went(run: Run) -> list[Phase]:
    """Return the phases of a run, the known ones in their order, then others, then what no iteration has.

    The last is the run's wall time less its iterations': start, engine, the evaluation before the first iteration, and
    iterations that an interrupt cut.
    """
    unknown = sorted({name.removeprefix("time/") for name in run.prefixed("time/")} - {*PHASES, *WITHIN, "iteration"})
    names = {**PHASES, **{name: name.replace("_", " ") for name in unknown}}
    found = [(shown, phase_series(run, phase)) for phase, shown in names.items()]
    found = [(shown, series) for shown, series in found if math.fsum(series.values) > 0]
    if not found:
        return []
    inside = math.fsum(value for _, series in found for value in series.values)
    whole = max(run.seconds or 0.0, inside)
    count = max(run.iterations, 1)
    phases = []
    for shown, series in found:
        total, most = math.fsum(series.values), max(series.values)
        if total / whole >= SMALLEST:
            slowest = series.iterations[series.values.index(most)]
            phases.append(Phase(shown, total, total / whole, total / count, most, slowest))
    outside = whole - inside
    if outside / whole >= SMALLEST:
        phases.append(Phase("outside of iterations", outside, outside / whole))
    return phases
