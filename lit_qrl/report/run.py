"""A run folder, read as it is, cut short or half written: metrics, where the time went, and several seeds as one."""

import csv
import io
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from lit_qrl.run.event_log import EVENTS_FILE, METRICS_FILE, SAMPLES_FILE, read_jsonl

ENDINGS = {"finish": "finished", "interrupt": "interrupted", "exception": "failed"}
"""Kinds of events that end a session, and what the run is called after them."""
BOUNDS = ("_ci_low", "_ci_high")
"""Behind the name of an accuracy: the ends of its 95 % interval."""
STOPPED = "stopped"
"""End of the name of a share that is no accuracy: of answers that ended by themselves."""


@dataclass(frozen=True)
class Series:
    """One metric over the run.

    Args:
        iterations: how many iterations were done when the value was taken, ascending.
        values: finite numbers, as many.
    """

    iterations: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.values)

    @property
    def first(self) -> float | None:
        """The first value, None without any."""
        return self.values[0] if self.values else None

    @property
    def last(self) -> float | None:
        """The last value, None without any."""
        return self.values[-1] if self.values else None

    @property
    def mean(self) -> float | None:
        """The mean over iterations, None without any value."""
        return math.fsum(self.values) / len(self.values) if self.values else None

    @property
    def minimum(self) -> float | None:
        """The smallest value, None without any."""
        return min(self.values, default=None)


class Run:
    """What a run folder tells; every file may be missing, cut or empty.

    Args:
        folder: the run folder.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.config_text = _read_text(self.folder / "config.yaml")
        self.rows = read_metrics(self.folder / METRICS_FILE)
        self.events = read_jsonl(self.folder / EVENTS_FILE)
        self.samples = read_jsonl(self.folder / SAMPLES_FILE)
        self.publish = _read_json(self.folder / "publish.json")
        self.histograms = _read_json(self.folder / "histograms.json")
        self._series: dict[str, Series] = {}

    @property
    def name(self) -> str:
        """The folder's name, with its parent's when it is only a number."""
        path = self.folder.resolve()
        return f"{path.parent.name}/{path.name}" if path.name.isdigit() else path.name

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration, empty when it cannot be read."""
        import yaml

        try:
            loaded = yaml.safe_load(self.config_text)
        except yaml.YAMLError:
            return {}
        return loaded if isinstance(loaded, dict) else {}

    def setting(self, *keys: str) -> Any:
        """Return the value at a path of the configuration, or None."""
        value: Any = self.config
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    @cached_property
    def names(self) -> list[str]:
        """Names of the metrics that have at least one finite value, sorted."""
        found = {name for row in self.rows for name, value in row.items() if math.isfinite(value)}
        return sorted(found - {"epoch", "step"})

    def series(self, name: str) -> Series:
        """Return one metric over the iterations: the mean of its finite values in each."""
        if name not in self._series:
            values: dict[int, list[float]] = defaultdict(list)
            for row, iteration in zip(self.rows, self._iterations(evaluation=name.startswith("val/")), strict=True):
                if math.isfinite(value := row.get(name, math.nan)):
                    values[iteration].append(value)
            ordered = sorted(values)
            self._series[name] = Series(ordered, [math.fsum(values[i]) / len(values[i]) for i in ordered])
        return self._series[name]

    def prefixed(self, prefix: str) -> list[str]:
        """Return the metrics whose name starts so."""
        return [name for name in self.names if name.startswith(prefix)]

    @property
    def iterations(self) -> int:
        """Iterations that have a row of training metrics."""
        return max((i for i, row in zip(self._iterations(), self.rows, strict=True) if _is_training(row)), default=0)

    @property
    def accuracy(self) -> Series:
        """The held-out accuracy: sampled, or else greedy; else the first benchmark's."""
        own = self.series("val/accuracy") or self.series("val/greedy_pass@1")
        return own or next((self.series(name) for names in self.benchmarks.values() for name in names), Series())

    @cached_property
    def benchmarks(self) -> dict[str, list[str]]:
        """By the name of each benchmark the metrics of its accuracies, without those of their intervals."""
        found: dict[str, list[str]] = {}
        for name in self.prefixed("val/"):
            parts = name.split("/")
            if len(parts) == 3 and not name.endswith((*BOUNDS, STOPPED)):
                found.setdefault(parts[1], []).append(name)
        # Sampled first: "pass@…" stands behind "greedy_pass@1".
        return {benchmark: sorted(names, key=_order) for benchmark, names in found.items()}

    def interval(self, name: str) -> tuple[Series, Series]:
        """Return the ends of the 95 % interval of an accuracy, empty where it has none."""
        low, high = (self.series(f"{name}{bound}") for bound in BOUNDS)
        return low, high

    @property
    def kl(self) -> Series:
        """The KL from sampler to learner, in nats per token: by k3, or else by k1."""
        return self.series("mismatch/kl_k3") or self.series("mismatch/kl_k1")

    @property
    def status(self) -> str:
        """`finished`, `interrupted`, `failed`, `running`, or `unknown` without an event log."""
        for event in reversed(self.events):
            kind = event.get("kind")
            if kind in ENDINGS:
                return ENDINGS[kind]
            if kind in ("start", "resume"):
                return "running"
        return "unknown"

    @property
    def seconds(self) -> float | None:
        """Wall time of the run's sessions, without the pauses between them."""
        total, start, last = 0.0, None, None
        for event in self.events:
            now = _number(event.get("time"))
            if now is None:
                continue
            if event.get("kind") in ("start", "resume"):
                before = last - start if start is not None and last is not None else 0.0
                total = total + before if event.get("kind") == "resume" else 0.0
                start = now
            last = now
        if start is None or last is None:
            return None
        if self.status == "running":
            with suppress(OSError):
                last = max(last, (self.folder / METRICS_FILE).stat().st_mtime)
        return total + max(last - start, 0.0)

    @property
    def layers(self) -> dict[str, str]:
        """For every tensor name the format that was loaded at the last publish."""
        layers = self.publish.get("layers")
        return {str(name): str(format) for name, format in layers.items()} if isinstance(layers, dict) else {}

    @property
    def sizes(self) -> dict[str, int]:
        """For every tensor name the bytes that were sent of it; empty where the run did not say."""
        sizes = self.publish.get("sizes")
        return {str(name): int(n) for name, n in sizes.items() if _number(n)} if isinstance(sizes, dict) else {}

    def share(self, kind: str) -> float | None:
        """Return the `quantized` or `verified` share of the sampler, or None where the run did not say."""
        return _number(self.publish.get(f"{kind}_share"))

    @property
    def format(self) -> str | None:
        """The sampler's number format, as loaded."""
        quantized = [name for name in self.layers.values() if name not in ("bf16", "fp16", "fp32", "None")]
        if quantized:
            return max(sorted(set(quantized)), key=quantized.count)
        return max(sorted(set(self.layers.values())), key=list(self.layers.values()).count, default=None)

    @property
    def correction(self) -> str | None:
        """Names of the corrections, joined; `none` when the run says that it has none."""
        names = self.started.get("corrections")
        return (" + ".join(map(str, names)) or "none") if isinstance(names, list) else None

    @property
    def started(self) -> dict[str, Any]:
        """What the run said of itself when it began."""
        return next((event for event in reversed(self.events) if event.get("kind") == "start"), {})

    def _iterations(self, evaluation: bool = False) -> list[int]:
        """Return for each row how many iterations were done at its end."""
        done = [int(row.get("epoch", row.get("step", index))) + 1 for index, row in enumerate(self.rows)]
        if evaluation and (first := self._before_training()) is not None:
            done[first] = 0
        return done

    def _before_training(self) -> int | None:
        """Return the row of the evaluation before the first iteration.

        Lightning numbers it like one at the end of the first iteration: epoch 0, step 0. They are told apart by what
        comes after: a second evaluation in that epoch, a training row of the epoch at a later step, or the distance
        of the other evaluations, into which a first iteration would not fit.
        """
        evaluations = [i for i, row in enumerate(self.rows) if any(name.startswith("val/") for name in row)]
        if not evaluations or self.rows[evaluations[0]].get("epoch", 0) != 0:
            return None
        first, later = evaluations[0], [int(self.rows[i].get("epoch", 0)) for i in evaluations[1:]]
        if any(_is_training(row) for row in self.rows[: first + 1]):
            return None
        trained = [row for row in self.rows if _is_training(row) and row.get("epoch") == 0]
        if any(row.get("step", 0) > self.rows[first].get("step", 0) for row in trained):
            return first
        every = math.gcd(*(epoch + 1 for epoch in later))
        return first if not later or later[0] == 0 or every > 1 else None


def _order(name: str) -> tuple[bool, int]:
    k = name.rpartition("@")[2]
    return "greedy" in name, int(k) if k.isdigit() else 0


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the rows of a metrics file with the cells that are numbers; a last line without its end is left out."""
    text = _read_text(path)
    lines = list(csv.reader(io.StringIO(text[: text.rfind("\n") + 1].replace("\0", ""), newline="")))
    if not lines:
        return []
    rows = []
    for cells in lines[1:]:
        numbers = {name: _number(cell) for name, cell in zip(lines[0], cells, strict=False)}
        row = {name: number for name, number in numbers.items() if number is not None}
        if not all(math.isfinite(row.get(key, 0.0)) for key in ("epoch", "step")):
            continue
        if row:
            rows.append(row)
    return rows


def _is_training(row: dict[str, float]) -> bool:
    return any(not name.startswith(("val/", "test/")) and name not in ("epoch", "step") for name in row)


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", errors="replace")
    except OSError:
        return ""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(_read_text(path) or "{}")
    except ValueError:
        return {}
    return loaded if isinstance(loaded, dict) else {}


NOT_SETTINGS = ("seed_everything", "ckpt_path", "resume_if_possible", "trainer.default_root_dir", "data.seed")
"""Settings in which two runs of one configuration may differ; a task's seed makes other problems, so it counts."""
BAND = "± one standard error of the mean over seeds"
"""What the band is, in words."""


class Seeds:
    """Several runs of one configuration, with what figures and tables ask of a `Run`.

    Args:
        runs: at least one.
    """

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
        settings = json.dumps(_without(run.config, ""), sort_keys=True, default=str) if run.config else ""
        groups.setdefault(settings or f"alone {index}", []).append(index)
    return list(groups.values())


def _without(value: Any, path: str) -> Any:
    if not isinstance(value, dict):
        return value
    inner = {str(key): (f"{path}.{key}".lstrip("."), item) for key, item in value.items()}
    return {key: _without(item, where) for key, (where, item) in inner.items() if where not in NOT_SETTINGS}


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
