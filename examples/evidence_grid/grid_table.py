"""A line for every run of the grid: its end, and the metrics of its first iterations; and the table of its arms."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import study as studies
from study_report import detectable, spread, standard_error

from lit_qrl.report.run import Run

RUNS_FILE, CURVES_FILE, TABLE_FILE = "runs.csv", "curves.csv", "table.md"
LAST_EVALUATIONS, LAST_ITERATIONS, EARLY = 4, 20, 10
COLLAPSED, LOSS = 0.5, 0.05
METRICS = {
    "abs_log_ratio": "mismatch/abs_log_ratio",
    "log_ratio_p99": "mismatch/log_ratio_p99",
    "chi2_token": "mismatch/chi2_token",
    "chi2_sequence": "mismatch/chi2_sequence",
    "ess_ratio": "mismatch/ess_ratio",
    "kl_k1": "mismatch/kl_k1",
    "kl_k3": "mismatch/kl_k3",
    "abs_prob_diff": "mismatch/abs_prob_diff",
    "grad_norm": "update/grad_norm",
    "entropy": "update/entropy",
    "update_kl": "update/kl",
    "clipped": "update/clip_fraction_high_positive",
    "clipped_low": "update/clip_fraction_low_negative",
    "ratio_p01": "update/ratio_p01",
    "ratio_p99": "update/ratio_p99",
    "reward": "reward/mean",
    "reward_std": "reward/std",
    "length": "rollout/length",
    "alpha": "correction/alpha",
}
"""Metrics of the first iterations by their name in the CSV, as means over iterations 1 to 5 and 6 to 10."""
CURVES = ("reward", "abs_log_ratio", "alpha", "entropy", "ess_ratio", "clipped", "clipped_low", "update_kl")
"""Metrics of whole runs, as means over ten iterations each."""
HALVES = {"a": (0, EARLY // 2), "b": (EARLY // 2, EARLY)}
ENDS = ("learner", "sampler", "start", "best", "log_ratio_1", "log_ratio_mean", "log_ratio_last")
KEY = ("study", "rate", "arm", "seed")
EVALUATED = range(10, 121, 10)
FIELDS = (
    *(*KEY, "iterations", *ENDS),
    *(f"accuracy_{at}" for at in EVALUATED),
    *(f"{name}_{half}" for half in HALVES for name in METRICS),
)
Row = dict[str, str | int | float | None]


def key(row: Mapping[str, object]) -> tuple[object, ...]:
    """Return what tells a run from all others."""
    return tuple(row[name] for name in KEY)


def row(study: str, rate: float, job: studies.Job) -> Row:
    """Return a finished run's line."""
    run = Run(job.folder)
    accuracy, reward, distance = run.accuracy, run.series("reward/mean"), run.series(METRICS["abs_log_ratio"])
    evaluated = dict(zip(accuracy.iterations, accuracy.values, strict=True))
    early = {
        f"{name}_{half}": _between(run, metric, *HALVES[half]) for half in HALVES for name, metric in METRICS.items()
    }
    return {
        "study": study,
        "rate": rate,
        "arm": job.arm,
        "seed": job.seed,
        "iterations": run.iterations,
        "learner": fmean(accuracy.values[-LAST_EVALUATIONS:]),
        "sampler": fmean(reward.values[-LAST_ITERATIONS:]),
        "start": accuracy.values[0],
        "best": max(accuracy.values),
        "log_ratio_1": distance.first,
        "log_ratio_mean": fmean(distance.values),
        "log_ratio_last": fmean(distance.values[-LAST_ITERATIONS:]),
        **{f"accuracy_{at}": evaluated.get(at) for at in EVALUATED},
        **early,
    }


def write_curves(jobs: Sequence[studies.Job], folder: Path, before: Path) -> None:
    """Write what runs were at after every tenth iteration, behind the lines of an earlier file that are not theirs.

    Args:
        jobs: of the runs; what one has not reached has no line.
        folder: for the file.
        before: the earlier file; it need not exist.
    """
    lines = [line for job in jobs for line in curve(job)]
    ours = {(str(line["arm"]), str(line["seed"])) for line in lines}
    if before.is_file():
        with before.open(newline="") as file:
            lines = [*(line for line in csv.DictReader(file) if (line["arm"], line["seed"]) not in ours), *lines]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / CURVES_FILE).open("w", newline="") as file:
        writer = csv.DictWriter(file, ("arm", "seed", "iteration", "learner", *CURVES), lineterminator="\n")
        writer.writeheader()
        for line in lines:
            writer.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in line.items()})


def curve(job: studies.Job) -> list[Row]:
    """Return a run's accuracy after every tenth iteration, and the metrics' means over the ten before."""
    run = Run(job.folder)
    evaluated = dict(zip(run.accuracy.iterations, run.accuracy.values, strict=True))
    points = range(EARLY, run.iterations + 1, EARLY)
    return [
        {"arm": job.arm, "seed": job.seed, "iteration": at, "learner": evaluated.get(at)}
        | {name: _between(run, METRICS[name], at - EARLY, at) for name in CURVES}
        for at in points
    ]


def _between(run: Run, metric: str, after: int, until: int) -> float | None:
    series = run.series(metric)
    values = [y for x, y in zip(series.iterations, series.values, strict=True) if after < x <= until]
    return fmean(values) if values else None


def read(path: Path) -> list[Row]:
    """Return what `write` has written."""

    def made(name: str, text: str) -> str | int | float | None:
        if name in ("study", "arm"):
            return text
        return int(text) if name in ("seed", "iterations") else float(text) if text else None

    with path.open(newline="") as file:
        return [{name: made(name, line.get(name) or "") for name in FIELDS} for line in csv.DictReader(file)]


def difference(ours: Mapping[str, object], theirs: Mapping[str, object]) -> float | None:
    """Return a run's accuracy minus another's at the end, or at the last evaluations that both have.

    A run that a time limit has cut is compared with what the other had reached by then; None where that is not known.
    """
    if ours["iterations"] == theirs["iterations"]:
        return _number(ours["learner"]) - _number(theirs["learner"])
    names = [f"accuracy_{at}" for at in EVALUATED]
    common = [name for name in names if None not in (ours[name], theirs[name])][-LAST_EVALUATIONS:]
    until = min(_number(ours["iterations"]), _number(theirs["iterations"])) // EARLY * EARLY
    if not common or common[-1] != f"accuracy_{until:g}":
        return None
    return fmean(_number(ours[name]) - _number(theirs[name]) for name in common)


def control_of(arm: str) -> str:
    """Return the arm whose bf16 sampler an arm is compared with: the same but for dial, correction and format.

    >>> control_of("cosine+s10+none+int4"), control_of("s13+tis+int4"), control_of("slow+s12+none+int4")
    ('cosine+s10+none+bf16', 's8+none+bf16', 'slow+s8+none+bf16')
    """
    *habits, _, _, _ = arm.split("+")
    position = "s8" if habits in ([], ["slow"]) else "s10"
    return "+".join([*habits, position, "none", "bf16"])


def write(rows: Sequence[Row], folder: Path) -> str:
    """Write every run's line and the table of the grid's arms, which is that of the lines as they were written.

    Returns:
        The table's text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / RUNS_FILE).open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        for line in rows:
            writer.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in line.items()})
    text = "\n".join(table([one for one in read(folder / RUNS_FILE) if one["study"] == "grid"]))
    (folder / TABLE_FILE).write_text(text + "\n")
    return text


def table(rows: Sequence[Row]) -> list[str]:
    """Return a Markdown table of the grid's arms, each with the paired differences to its bf16 sampler's run.

    That of samplers, means of the last iterations, is taken where both runs have as many.
    """
    head = (
        "arm",
        "seeds",
        "mean abs. log-ratio, first ten",
        "last",
        "learner",
        "sampler",
        "to bf16",
        "detectable",
        "sampler to bf16",
    )
    arms: dict[str, dict[int, Row]] = {}
    for one in rows:
        arms.setdefault(str(one["arm"]), {})[int(one["seed"] or 0)] = one
    lines = []
    for arm, runs in arms.items():
        control = arms.get(control_of(arm), {})
        gaps = [difference(runs[seed], control[seed]) for seed in runs if seed in control]
        gap = [one for one in gaps if one is not None]
        judged = bool(gap) and not arm.endswith("bf16")
        sampled = [
            _number(runs[seed]["sampler"]) - _number(control[seed]["sampler"])
            for seed in runs
            if seed in control and runs[seed]["iterations"] == control[seed]["iterations"]
        ]
        lines.append(
            (
                arm,
                str(len(runs)),
                spread([early(one, "abs_log_ratio") for one in runs.values()]),
                spread([_number(one["log_ratio_last"]) for one in runs.values()]),
                spread([_number(one["learner"]) for one in runs.values()]),
                spread([_number(one["sampler"]) for one in runs.values()]),
                told(gap) if judged else "–",
                f"{detectable(gap):.2g}" if judged and len(gap) > 1 else "–",
                told(sampled) if judged and sampled else "–",
            )
        )
    return ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *lines)]


def told(gaps: Sequence[float]) -> str:
    """Return a mean difference, and its standard error where there is one.

    >>> told([-0.1, -0.3]), told([0.25])
    ('-0.200 ± 0.1', '+0.250')
    """
    return f"{fmean(gaps):+.3f}" + (f" ± {standard_error(gaps):.2g}" if len(gaps) > 1 else "")


def _number(value: object) -> float:
    return float("nan") if value is None else float(str(value))


def early(row: Mapping[str, object], name: str) -> float:
    """Return a metric's mean over the first ten iterations, NaN where the run has none."""
    found = [_number(row[f"{name}_{half}"]) for half in HALVES if row[f"{name}_{half}"] is not None]
    return fmean(found) if found else float("nan")
