"""Runs the arms of the long-reasoning study on one GPU that all runs share, and writes their curves and a table.

    python examples/long_reasoning/warm_start.py --output out/long/adder
    python examples/long_reasoning/arms.py --out out/long --jobs 8 --minutes 5 --seeds 0 1 2 \
        --arms 's1+none+bf16' 'DIAL+{none,tis,sequence_tis}+int4'
    python examples/long_reasoning/arms.py --out out/long --report

DIAL is the furthest position of the dial at which the quantized policy still solves enough to learn from; it is probed
first. Seed by seed, in the order of the arms. A run that the time limit cuts counts up to its last evaluation, and is
compared with the bf16 sampler of its seed where both were evaluated. The same command goes on where it was cut.
"""

import argparse
import csv
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / name) for name in ("long_reasoning", "evidence_study", "", "mismatch_dial")]

import dial  # noqa: E402
import figure  # noqa: E402
import probe  # noqa: E402
import run as evidence  # noqa: E402
import study as studies  # noqa: E402
from paired import holm, paired_test  # noqa: E402
from study_report import detectable, spread, standard_error  # noqa: E402

from lit_qrl.report.run import Run, Series  # noqa: E402

SCALES = {"s1": 1, "s2": 2, "s3": 3, "s4": 4, "s6": 6, "s8": 8}
"""Positions of the dial. Powers of two change no bit of a learner in bf16; what others round, the probe shows."""
CHANNELS = 8
"""That the dial makes outliers of each norm, of 512: two in each group of INT4."""
CONTROL = "s1+none+bf16"
"""The bf16 sampler of all positions."""
DIAL = "DIAL"
"""What stands in an arm for the position that is chosen."""
CURVES_FILE, TABLE_FILE, FIGURE_FILE, PROBE_FILE = "curves.csv", "table.md", "figure.png", "probe.json"
PILOT_FILE, PILOT_SEED, PILOT_ITERATIONS = "pilot.json", 100, 15
PILOT_SHARE = 0.25
"""Of the time limit, that the pilot takes at most: it is judged by what it has evaluated by then."""
METRICS = {
    "sampler": "reward/mean",
    "log_ratio": "mismatch/abs_log_ratio",
    "chi2_sequence": "mismatch/chi2_sequence",
    "ess_ratio": "mismatch/ess_ratio",
    "entropy": "update/entropy",
    "length": "rollout/length",
    "alpha": "correction/alpha",
}
"""Metrics by their name in the CSV: means of the iterations since the evaluation before."""
FIELDS = ("arm", "seed", "iteration", "learner", *METRICS)
Row = dict[str, str | int | float | None]


def make_models(policy: Path, out: Path) -> None:
    """Write the dialled policies that are not there."""
    for name, scale in SCALES.items():
        folder = out / "models" / name
        if not (folder / "config.json").is_file() and dial.main(
            ["--model", str(policy), "--output", str(folder), "--scale", str(scale), "--channels", str(CHANNELS)]
        ):
            raise SystemExit(2)


def chosen(out: Path) -> str:
    """Return the position of the dial for DIAL: what was probed before is kept in the results."""
    file = out / "results" / PROBE_FILE
    if not file.is_file():
        found = probe.probe(out / "models", list(SCALES), "cuda" if torch.cuda.is_available() else "cpu")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, indent=1) + "\n")
        print(json.dumps(found), flush=True)
    return probe.choose(json.loads(file.read_text()))


def pilot_jobs(out: Path, rates: Sequence[float], extra: Sequence[str]) -> dict[float, studies.Job]:
    """Return the pilot's run of the bf16 sampler at each learning rate."""
    short = ["--trainer.max_epochs", str(PILOT_ITERATIONS), "--trainer.check_val_every_n_epoch", "5"]
    return {
        rate: jobs_of(out, [CONTROL], [PILOT_SEED], [*extra, *short, *evidence.rate_option(rate)], f"pilot/{rate:g}")[0]
        for rate in rates
    }


def best_rate(accuracies: Mapping[float, Sequence[float]]) -> float:
    """Return the rate at which the bf16 sampler's learner got furthest.

    That is the mean of the last two evaluations that all runs have, the one before training left out; where the time
    limit left none of some run, the rate in the middle.

    >>> best_rate({1e-5: [0.5, 0.6, 0.7], 1e-4: [0.5, 0.1, 0.0], 1e-6: [0.5, 0.5, 0.5]})
    1e-05
    >>> best_rate({3e-6: [0.5, 0.5], 1e-5: [0.5, 0.6, 0.1], 3e-5: [0.5, 0.4]})
    1e-05
    >>> best_rate({3e-6: [], 1e-5: [], 3e-5: [0.5]})
    1e-05
    """
    common = min(map(len, accuracies.values()))
    if common < 2:
        return sorted(accuracies)[len(accuracies) // 2]
    return max(accuracies, key=lambda rate: fmean(accuracies[rate][1:common][-2:]))


def piloted(out: Path, rates: Sequence[float], extra: Sequence[str], gpu: str, deadline: float) -> float:
    """Return the learning rate that the pilot chooses; what it found is kept in the results."""
    file = out / "results" / PILOT_FILE
    if not file.is_file():
        jobs, now = pilot_jobs(out, rates, extra), time.monotonic()
        evidence.run_until(list(jobs.values()), len(jobs), now + PILOT_SHARE * (deadline - now), gpu)
        found = {f"{rate:g}": Run(job.folder).accuracy.values for rate, job in jobs.items()}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, indent=1) + "\n")
    found = json.loads(file.read_text())
    rate = best_rate({float(name): values for name, values in found.items()})
    print(f"The pilot chooses a learning rate of {rate:g}: {found}", flush=True)
    return rate


def jobs_of(
    out: Path, arms: Sequence[str], seeds: Sequence[int], extra: Sequence[str], runs: str = "runs"
) -> list[studies.Job]:
    """Return the runs, seed by seed, in a folder `runs` of `out`; their models are under `out` too."""
    found = []
    for job in studies.plan(studies.load(HERE), out / runs, arms, seeds, extra):
        scale = next(part for part in job.arm.split("+") if part in SCALES)
        policy = ("--model.policy.model", str(out / "models" / scale))
        found.append(replace(job, arguments=(*job.arguments, *policy)))
    return found


def curve(job: studies.Job) -> list[Row]:
    """Return a run's lines, one for each evaluation of the learner."""
    run, found, before = Run(job.folder), [], 0
    for at, accuracy in zip(run.accuracy.iterations, run.accuracy.values, strict=True):
        means = {name: between(run.series(metric), before, at) for name, metric in METRICS.items()}
        found.append({"arm": job.arm, "seed": job.seed, "iteration": at, "learner": accuracy, **means})
        before = at
    return found


def between(series: Series, after: int, until: int) -> float | None:
    """Return the mean over iterations after one and up to another, None where there is none."""
    values = [y for x, y in zip(series.iterations, series.values, strict=True) if after < x <= until]
    return fmean(values) if values else None


def read(path: Path) -> list[Row]:
    """Return what `write` has written."""

    def made(name: str, text: str) -> str | int | float | None:
        if name == "arm":
            return text
        return int(text) if name in ("seed", "iteration") else float(text) if text else None

    with path.open(newline="") as file:
        return [{name: made(name, line[name]) for name in FIELDS} for line in csv.DictReader(file)]


def write(rows: Sequence[Row], folder: Path) -> str:
    """Write every run's curve and the table of the arms into `folder`; return the table's text."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / CURVES_FILE).open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        for line in rows:
            writer.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in line.items()})
    text = "\n".join(table(compared(read(folder / CURVES_FILE))))
    (folder / TABLE_FILE).write_text(text + "\n")
    return text


def compared(rows: Sequence[Row]) -> list[Row]:
    """Return the lines of seeds of which more than one arm was trained, or all where there are none.

    >>> [row["arm"] for row in compared([{"arm": arm, "seed": arm == "c", "iteration": 10} for arm in "abc"])]
    ['a', 'b']
    """
    arms: dict[object, set[object]] = {}
    for row in rows:
        if row["iteration"] != 0:
            arms.setdefault(row["seed"], set()).add(row["arm"])
    return [row for row in rows if len(arms.get(row["seed"], ())) > 1] or list(rows)


def table(rows: Sequence[Row]) -> list[str]:
    """Return a Markdown table of the arms, each with the paired difference to the bf16 sampler.

    Accuracies are means of the last two evaluations; of a pair, of the last two that both runs have. Probabilities
    are of paired t-tests of the learners, by Holm over the arms of a plain learner under INT4.
    """
    head = ("arm", "seeds", "iterations", "mean abs. log-ratio, first", "last", "learner", "sampler", "entropy")
    head = (*head, "to bf16: learner", "detectable", "sampler", "p", "over no correction: learner", "p")
    runs: dict[str, dict[int, dict[int, Row]]] = {}
    for one in rows:
        there = runs.setdefault(str(one["arm"]), {}).setdefault(int(str(one["seed"])), {})
        there[int(str(one["iteration"]))] = one
    lines = []
    found = {
        arm: there
        for arm, seeds in runs.items()
        if (there := {seed: points for seed, points in seeds.items() if max(points) > 0})
    }
    control = found.get(CONTROL, {})
    plain = [arm for arm in found if arm.endswith("+int4")]
    without = next((found[arm] for arm in plain if arm.split("+")[1] == "none"), {})
    over = {arm: paired(found[arm], without, "learner") for arm in plain if without and found[arm] is not without}
    to_bf16 = holm({arm: paired_test(paired(found[arm], control, "learner")) for arm in plain})
    to_none = holm({arm: paired_test(gaps) for arm, gaps in over.items()})
    for arm, trained in found.items():
        gaps = {name: paired(trained, control, name) for name in ("learner", "sampler")}
        judged = arm != CONTROL
        lines.append(
            (
                arm,
                str(len(trained)),
                "–".join(sorted({str(f([max(p) for p in trained.values()])) for f in (min, max)}, key=int)),
                spread([number(points[sorted(points)[1]]["log_ratio"]) for points in trained.values()]),
                spread([number(points[max(points)]["log_ratio"]) for points in trained.values()]),
                *(
                    spread([ending(points, sorted(points), name) for points in trained.values()])
                    for name in ("learner", "sampler", "entropy")
                ),
                told(gaps["learner"]) if judged else "–",
                f"{detectable(gaps['learner']):.2g}" if judged and len(gaps["learner"]) > 1 else "–",
                told(gaps["sampler"]) if judged else "–",
                f"{to_bf16[arm]:.2g}" if arm in to_bf16 else "–",
                told(over[arm]) if arm in over else "–",
                f"{to_none[arm]:.2g}" if arm in to_none else "–",
            )
        )
    return ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *lines)]


def paired(ours: dict[int, dict[int, Row]], theirs: dict[int, dict[int, Row]], name: str) -> list[float]:
    """Return for each seed of both the difference at the last two evaluations that both runs have."""
    found = []
    for seed in sorted(ours.keys() & theirs.keys()):
        common = sorted(at for at in ours[seed].keys() & theirs[seed].keys() if at > 0)
        ends = [ending(points[seed], common, name) for points in (ours, theirs)]
        if ends[0] is not None and ends[1] is not None:
            found.append(ends[0] - ends[1])
    return found


def ending(points: dict[int, Row], evaluated: Sequence[int], name: str) -> float | None:
    """Return a metric's mean over the last two of some evaluations, without that before the first iteration."""
    there = [number(points[at][name]) for at in [at for at in evaluated if at > 0][-2:]]
    values = [value for value in there if value is not None]
    return fmean(values) if values else None


def told(gaps: Sequence[float]) -> str:
    """Return a mean difference with its standard error."""
    if not gaps:
        return "–"
    return f"{fmean(gaps):+.3f}" + (f" ± {standard_error(gaps):.2g}" if len(gaps) > 1 else "")


def number(value: object) -> float | None:
    """Return a cell's number, None for an empty one."""
    return None if value is None else float(str(value))


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    given, extra = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=evidence.ROOT / "runs" / "long_reasoning")
    parser.add_argument("--policy", type=Path, help="what warm_start.py has made (default: OUT/adder)")
    parser.add_argument("--arms", nargs="+", default=["*"], help="names or patterns, the most important first")
    parser.add_argument("--seeds", type=int, nargs="+", default=range(5))
    parser.add_argument("--jobs", type=int, default=4, help="runs at a time")
    parser.add_argument("--gpu", default="0", help="that all runs share; empty for none")
    parser.add_argument("--dial", choices=SCALES, help="position for DIAL, instead of a probe")
    parser.add_argument("--rate", type=float, help="learning rate, instead of the configuration's")
    parser.add_argument("--rates", type=float, nargs="+", default=[], help="choose among these by a pilot first")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="time limit")
    parser.add_argument("--list", action="store_true", help="show the runs and their states, run nothing")
    parser.add_argument("--report", action="store_true", help="write what there is, run nothing")
    parser.add_argument("--before", type=Path, help="results of an earlier call, which are not run again")
    options = parser.parse_args(given)
    deadline, out = time.monotonic() + 60 * options.minutes, options.out.resolve()
    earlier = read(options.before / CURVES_FILE) if options.before else []
    known = {(row["arm"], row["seed"]) for row in earlier}
    running = not (options.list or options.report)
    if running:
        make_models(options.policy or out / "adder", out)
    position = options.dial
    if position is None and any(DIAL in pattern for pattern in options.arms):
        position = chosen(out)
    patterns = [pattern.replace(DIAL, position or DIAL) for pattern in options.arms]
    arms = [arm for pattern in patterns for arm in studies.expand(pattern)]
    rate = options.rate
    if options.rates and not options.list:
        rate = piloted(out, options.rates, extra, options.gpu, deadline)
    extra += evidence.rate_option(rate) if rate else []
    jobs = [job for job in jobs_of(out, arms, options.seeds, extra) if (job.arm, job.seed) not in known]
    if options.list:
        for job in jobs:
            print(f"{job.state:<9} {job.arm} seed {job.seed}")
        return 0
    if running and any(job.state == "changed" for job in jobs):
        print(f"{out} holds runs of another configuration. Remove them, or choose another --out.", file=sys.stderr)
        return 2
    failed = evidence.run_until(jobs, options.jobs, deadline, options.gpu) if running else []
    rows = [*earlier, *(row for job in jobs if (job.folder / studies.COMMAND_FILE).is_file() for row in curve(job))]
    print(write(rows, out / "results"), flush=True)
    figure.draw(compared(rows), out / "results" / FIGURE_FILE)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
