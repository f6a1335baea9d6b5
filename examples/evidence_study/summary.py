"""What the runs of the evidence study come to: CSVs, a table for each setting, and a figure."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any

import study as studies
from paired import holm, paired_test
from study_report import detectable, number, spread, standard_error

from lit_qrl.report.figures import COLORS, INK, prepare
from lit_qrl.report.run import Run, Series

LAST_EVALUATIONS = 4
LAST_ITERATIONS = 20
FIRST_ITERATIONS = 5
CURVE_STEP = 10
"""Iterations to a point of a curve."""
COLLAPSED = 0.5
"""Share of the bf16 sampler's accuracy, same seed, below which a run has collapsed."""
PILOT_FILE, RUNS_FILE, CURVES_FILE, TESTS_FILE = "pilot.csv", "runs.csv", "curves.csv", "tests.csv"
TABLE_FILE, FIGURE_FILE, SETTINGS_FILE = "table.md", "figure.png", "settings.png"
SETTINGS = {
    "s8": "int4_group, dial at 8",
    "s10": "int4_group, dial at 10",
    "s12": "int4_group, dial at 12",
    "s4": "int3_channel, dial at 4",
    "cosine": "rate falling to 0",
    "one_update": "one update per rollout",
    "unscaled": "advantages not divided",
}
"""Titles of the settings, by the level that their arms begin with."""
NAMES = {"none": "no correction", "tis": "TIS", "mis": "MIS", "ais": "AIS", "ais_fitted": "AIS, δ = 0.2"}
NAMES |= {"sequence_tis": "sequence TIS", "sequence_mis": "sequence MIS", "aligned": "QATAligned"}
"""Arms in the figure, where they are not called as in the table."""


@dataclass(frozen=True)
class Outcome:
    """One finished run.

    Args:
        arm: as in `study.toml`.
        seed: of everything.
        iterations: trained.
        learner_accuracy: of the learner's weights in its dtype, held-out problems, mean of the last evaluations.
        sampler_accuracy: the reward, mean over the last iterations.
        start_accuracy: the learner's before the first iteration.
        best_accuracy: the learner's best evaluation.
        log_ratio_first: mean |log-ratio| over the first iterations, nats.
        log_ratio_mean: over all.
        log_ratio_last: over the last.
        ess_lowest: lowest effective sample size of an iteration, ratio.
    """

    arm: str
    seed: int
    iterations: int
    learner_accuracy: float
    sampler_accuracy: float
    start_accuracy: float
    best_accuracy: float
    log_ratio_first: float
    log_ratio_mean: float
    log_ratio_last: float
    ess_lowest: float


@dataclass(frozen=True)
class Point:
    """A run at one iteration: accuracy of the learner there, means of the iterations since the point before."""

    arm: str
    seed: int
    iteration: int
    learner_accuracy: float | None
    sampler_accuracy: float | None
    log_ratio: float | None


@dataclass(frozen=True)
class Comparison:
    """A paired comparison of two arms in the learner's accuracy."""

    arm: str
    against: str
    seeds: int
    difference: float
    standard_error: float
    p: float
    p_holm: float
    detectable: float


@dataclass
class Results:
    """Everything that the CSVs hold."""

    outcomes: list[Outcome] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)

    @property
    def finished(self) -> set[tuple[str, int]]:
        """Arm and seed of what is there."""
        return {(one.arm, one.seed) for one in self.outcomes}

    def joined(self, other: "Results") -> "Results":
        """Return these results and those of the other that are not among them."""
        mine = self.finished
        return Results(
            [*self.outcomes, *(one for one in other.outcomes if (one.arm, one.seed) not in mine)],
            [*self.points, *(one for one in other.points if (one.arm, one.seed) not in mine)],
        )

    def of(self, arm: str) -> dict[int, Outcome]:
        """Return an arm's runs by seed."""
        return {one.seed: one for one in sorted(self.outcomes, key=lambda one: one.seed) if one.arm == arm}

    def arms(self, level: str) -> list[str]:
        """Return a setting's arms in the order of the study, bf16 first."""
        known = [arm for arm in studies.load(Path(__file__).parent).arms if level_of(arm) == level]
        there = {one.arm for one in self.outcomes}
        return [arm for arm in known if arm in there]


def level_of(arm: str) -> str:
    """Return the setting of an arm.

    >>> level_of("s8+tis+int4"), level_of("cosine+s8+none+int4")
    ('s8', 'cosine')
    """
    return arm.partition("+")[0]


def short(arm: str) -> str:
    """Return what an arm is called within its setting.

    >>> short("s8+none+int4_aligned"), short("s8+none+bf16"), short("s4+tis+int3")
    ('aligned', 'bf16 sampler', 'tis')
    """
    correction, sampler = arm.split("+")[-2:]
    if sampler in ("bf16", "fp8_block", "fp8_unified"):
        return {"bf16": "bf16 sampler", "fp8_block": "FP8 sampler", "fp8_unified": "unified FP8"}[sampler]
    return "aligned" if sampler.endswith("aligned") else correction


# ---------------------------------------------------------------------------------------------------------- collecting


def collect(jobs: Iterable[studies.Job]) -> Results:
    """Return what the finished runs have measured."""
    results = Results()
    for job in jobs:
        run = Run(job.folder)
        reward, distance = run.series("reward/mean"), run.series("mismatch/abs_log_ratio")
        ess = run.series("mismatch/ess_ratio").minimum
        accuracy = run.accuracy
        results.outcomes.append(
            Outcome(
                arm=job.arm,
                seed=job.seed,
                iterations=run.iterations,
                learner_accuracy=fmean(accuracy.values[-LAST_EVALUATIONS:]),
                sampler_accuracy=fmean(reward.values[-LAST_ITERATIONS:]),
                start_accuracy=accuracy.values[0],
                best_accuracy=max(accuracy.values),
                log_ratio_first=fmean(distance.values[:FIRST_ITERATIONS]),
                log_ratio_mean=fmean(distance.values),
                log_ratio_last=fmean(distance.values[-LAST_ITERATIONS:]),
                ess_lowest=float("nan") if ess is None else ess,
            )
        )
        evaluated = dict(zip(accuracy.iterations, accuracy.values, strict=True))
        results.points += [
            Point(job.arm, job.seed, at, evaluated.get(at), since(reward, at), since(distance, at))
            for at in range(0, run.iterations + 1, CURVE_STEP)
        ]
    return results


def since(series: Series, iteration: int) -> float | None:
    """Return the mean over the iterations of the step that ends there."""
    values = [
        y for x, y in zip(series.iterations, series.values, strict=True) if iteration - CURVE_STEP < x <= iteration
    ]
    return fmean(values) if values else None


def write_rows(path: Path, kind: type, rows: Sequence[Any]) -> None:
    """Write records as CSV, numbers with four digits."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([one.name for one in fields(kind)])
        writer.writerows(rounded(row) for row in rows)


def write_pilot(folder: Path, outcomes: Mapping[float, Sequence[Outcome]]) -> None:
    """Write the pilot's runs, with their learning rates, into `pilot.csv`."""
    with (folder / PILOT_FILE).open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["rate", *(one.name for one in fields(Outcome))])
        for rate, there in outcomes.items():
            writer.writerows([f"{rate:g}", *rounded(one)] for one in there)


def rounded(record: Any) -> list[Any]:
    """Return a record's values, numbers with four digits."""
    return [f"{value:.4g}" if isinstance(value, float) else value for value in asdict(record).values()]


def read(folder: Path) -> Results:
    """Return what `write` has written."""

    def rows(name: str) -> list[dict[str, str]]:
        with (folder / name).open(newline="") as file:
            return list(csv.DictReader(file))

    def made(kind: Any, row: dict[str, str]) -> Any:
        whole = {"seed", "iteration", "iterations"}
        return kind(
            **{k: v if k == "arm" else int(v) if k in whole else float(v) if v else None for k, v in row.items()}
        )

    return Results([made(Outcome, row) for row in rows(RUNS_FILE)], [made(Point, row) for row in rows(CURVES_FILE)])


# ------------------------------------------------------------------------------------------------------------- judging


def differences(results: Results, arm: str, against: str) -> list[float]:
    """Return an arm's accuracy minus the other's, seed by seed."""
    ours, theirs = results.of(arm), results.of(against)
    return [ours[seed].learner_accuracy - theirs[seed].learner_accuracy for seed in ours if seed in theirs]


def compare(results: Results) -> list[Comparison]:
    """Return every arm against its setting's bf16 sampler, and every repair against no correction, Holm over all."""
    pairs = []
    for level in SETTINGS:
        arms = results.arms(level)
        plain = [arm for arm in arms if short(arm) == "bf16 sampler"]
        none = [arm for arm in arms if short(arm) == "none"]
        pairs += [(arm, plain[0]) for arm in arms if plain and arm not in plain]
        repairs = [arm for arm in arms if arm not in (*plain, *none) and "fp8" not in arm]
        pairs += [(arm, none[0]) for arm in repairs if none]
    gaps = {f"{arm} {against}": differences(results, arm, against) for arm, against in pairs}
    gaps = {name: gap for name, gap in gaps.items() if len(gap) > 1}
    raw = {name: paired_test(gap) for name, gap in gaps.items()}
    adjusted = holm(raw)
    return [
        Comparison(*name.split(), len(gap), fmean(gap), standard_error(gap), raw[name], adjusted[name], detectable(gap))
        for name, gap in gaps.items()
    ]


def collapsed(results: Results, arm: str, baseline: str) -> str:
    """Return how many of an arm's runs ended below half of the bf16 sampler's accuracy, as "2 of 5"."""
    ours, theirs = results.of(arm), results.of(baseline)
    common = [seed for seed in ours if seed in theirs]
    lost = sum(ours[seed].learner_accuracy < COLLAPSED * theirs[seed].learner_accuracy for seed in common)
    return f"{lost} of {len(common)}"


def probability(p: float) -> str:
    """Return a p-value as people read it.

    >>> probability(0.00004), probability(0.0123), probability(0.4)
    ('< 0.0001', '0.012', '0.40')
    """
    return "< 0.0001" if p < 1e-4 else f"{p:.2g}" if p < 0.1 else f"{p:.2f}"


def table(results: Results, level: str, compared: Sequence[Comparison]) -> list[str]:
    """Return the Markdown table of one setting."""
    arms = results.arms(level)
    plain = next((arm for arm in arms if short(arm) == "bf16 sampler"), None)
    by_pair = {(one.arm, short(one.against)): one for one in compared}
    head = (
        *("Arm", "Seeds", "Learner", "Sampler", "against bf16", "p", "detectable", "against none", "p"),
        *("collapsed", "mean abs. log-ratio, first", "mean", "last"),
    )
    rows = []
    for arm in arms:
        runs = list(results.of(arm).values())
        bf16, none = by_pair.get((arm, "bf16 sampler")), by_pair.get((arm, "none"))
        rows.append(
            [
                short(arm),
                str(len(runs)),
                spread([one.learner_accuracy for one in runs]),
                spread([one.sampler_accuracy for one in runs]),
                f"{bf16.difference:+.3f} ± {bf16.standard_error:.2g}" if bf16 else "–",
                probability(bf16.p_holm) if bf16 else "–",
                number(bf16.detectable) if bf16 else "–",
                f"{none.difference:+.3f} ± {none.standard_error:.2g}" if none else "–",
                probability(none.p_holm) if none else "–",
                collapsed(results, arm, plain) if plain and arm != plain else "–",
                *(
                    number(fmean(getattr(one, f"log_ratio_{when}") for one in runs))
                    for when in ("first", "mean", "last")
                ),
            ]
        )
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]


def write(results: Results, folder: Path) -> str:
    """Write CSVs, and table and figure of what they hold, into `folder`; return the table's text."""
    folder.mkdir(parents=True, exist_ok=True)
    order = {arm: place for place, arm in enumerate(studies.load(Path(__file__).parent).arms)}
    outcomes = sorted(results.outcomes, key=lambda one: (order[one.arm], one.seed))
    points = sorted(results.points, key=lambda one: (order[one.arm], one.seed, one.iteration))
    write_rows(folder / RUNS_FILE, Outcome, outcomes)
    write_rows(folder / CURVES_FILE, Point, points)
    results = read(folder)
    compared = compare(results)
    write_rows(folder / TESTS_FILE, Comparison, compared)
    lines = [f"{len(outcomes)} runs finished; {len(compared)} paired tests, p adjusted by Holm over all of them.", ""]
    for level, title in SETTINGS.items():
        if results.arms(level):
            lines += [f"## {title}", "", *table(results, level, compared), ""]
    text = "\n".join(lines)
    (folder / TABLE_FILE).write_text(text)
    if outcomes:
        levels = [level for level in SETTINGS if results.arms(level)]
        most = max(levels, key=lambda level: sum(len(results.of(arm)) for arm in results.arms(level)))
        draw(results, [most], folder / FIGURE_FILE)
        draw(results, levels, folder / SETTINGS_FILE)
    return text


# ------------------------------------------------------------------------------------------------------------- drawing


def draw(results: Results, levels: Sequence[str], path: Path) -> None:
    """Write a figure: for each setting curves of both policies and of the mismatch, and every run's end."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ink = INK
    panels = {
        "learner_accuracy": "Learner's accuracy",
        "sampler_accuracy": "Sampler's accuracy (reward)",
        "log_ratio": "Mean |log-ratio|, nats",
    }
    with rc_context({"font.size": 8.0, "font.family": "sans-serif"}):
        alone = len(levels) == 1  # two by two, as a page shows it
        size = (9.4, 6.0) if alone else (12.4, 2.7 * len(levels))
        sheet = Figure(size, dpi=150, facecolor=ink["paper"], layout="constrained")
        FigureCanvasAgg(sheet)
        grid = sheet.subplots(*((2, 2) if alone else (len(levels), 4)), squeeze=False).reshape(-1, 4)
        for line, level in zip(grid, levels, strict=True):
            # of one setting alone those that have a color of their own; its FP8 arms are told in words
            arms = [arm for arm in results.arms(level) if not (alone and "fp8" in arm)]
            free = cycle(COLORS)
            colors = {arm: "#20242c" if short(arm) == "bf16 sampler" else next(free) for arm in arms}
            for axes, (value, title) in zip(line, panels.items(), strict=False):
                prepare(axes, title)
                for arm in arms:
                    curve(axes, [one for one in results.points if one.arm == arm], value, colors[arm], short(arm))
            line[2].set_yscale("log")
            line[2].minorticks_off()
            line[2].set_xlabel("iteration", fontsize=8, color=ink["faint"])
            line[0].set_ylabel("" if alone else SETTINGS[level], fontsize=9, color=ink["text"])
            line[0].set_ylim(0, 1.02)
            line[1].set_ylim(0, 1.02)
            ends(line[3], results, arms, colors)
        sheet.savefig(path, facecolor=ink["paper"])


def curve(axes: Any, points: Sequence[Point], value: str, color: str, label: str) -> None:
    """Draw the mean over seeds and its standard error."""
    at: dict[int, list[float]] = {}
    for point in points:
        if (y := getattr(point, value)) is not None:
            at.setdefault(point.iteration, []).append(y)
    xs = sorted(at)
    means = [fmean(at[x]) for x in xs]
    errors = [standard_error(at[x]) if len(at[x]) > 1 else 0.0 for x in xs]
    axes.plot(xs, means, linewidth=1.4, color=color, label=label)
    low, high = ([m + side * e for m, e in zip(means, errors, strict=True)] for side in (-1, 1))
    axes.fill_between(xs, low, high, color=color, alpha=0.15, linewidth=0)


def ends(axes: Any, results: Results, arms: Sequence[str], colors: dict[str, str]) -> None:
    """Draw both policies' final accuracy of every run, a row for each arm, with their means."""
    prepare(axes, "At the end: learner ● above, sampler ○ below")
    for row, arm in enumerate(arms):
        for policy, at, face in (("learner", row - 0.2, colors[arm]), ("sampler", row + 0.2, "none")):
            values = [getattr(one, f"{policy}_accuracy") for one in results.of(arm).values()]
            axes.scatter(values, [at] * len(values), s=14, facecolors=face, edgecolors=colors[arm], alpha=0.6)
            axes.plot([fmean(values)] * 2, [at - 0.17, at + 0.17], color=colors[arm], linewidth=2)
    axes.set_yticks(range(len(arms)), [NAMES.get(short(arm), short(arm)) for arm in arms])
    for label, arm in zip(axes.get_yticklabels(), arms, strict=True):
        label.set_color(colors[arm])  # the legend of the row
    axes.invert_yaxis()
    axes.set_xlim(0, 1.02)
