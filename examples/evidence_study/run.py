"""Runs the evidence study: everything in docs/studies/evidence.md, by one command.

    python examples/evidence_study/run.py --quick                                  # 3 arms, 3 seeds on 2 cores
    python examples/evidence_study/run.py --jobs 64 --minutes 9 --out out/evidence # the whole, on 64 cores
    python examples/evidence_study/run.py --report --out out/evidence              # tables and figure again

A pilot comes first, on seeds of its own: it chooses learning rate and position of the dial by the rules of
docs/studies/evidence.md; `--rate` and `--scale` choose without it. Then come the runs of the hypotheses, seed by
seed, so that a study that is cut has whole seeds. At the time limit runs that go on are stopped and not counted; the
same command goes on from their checkpoints. Results of an earlier call, from another machine, are joined by `--before`.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "mismatch_dial")]

import dial  # noqa: E402
import study as studies  # noqa: E402
import summary  # noqa: E402
import verdicts  # noqa: E402
from pilot_figure import draw_pilot  # noqa: E402

ROOT = HERE.parents[1]
SCALES = {"s4": 4.0, "s8": 8.0, "s10": 10.0, "s12": 12.0}
"""The dial's positions, by the name of the arms' part."""
RATES, PILOT_SEEDS, PILOT_ITERATIONS = (5e-5, 1e-4, 2e-4, 4e-4), (100, 101), 160
PILOT = ("s4+none+bf16", "s4+none+int3", "{s8,s10,s12}+none+{bf16,int4}")
HEALTHY, LOSS = 0.95, 0.30
"""What the bf16 sampler must reach for a learning rate to be taken, and what no correction must lose for a scale."""
CORRECTIONS = "{none,tis,mis,sequence_tis,sequence_mis,ais,ais_fitted}"
STOP_SECONDS = 20.0
"""For a run to write its checkpoint after the time limit."""
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Phase:
    """What is run together: arms, with alternatives in braces, and seeds."""

    arms: tuple[str, ...]
    seeds: Sequence[int]


@dataclass(frozen=True)
class Choice:
    """What the pilot decides: the learning rate, and the part that names the position of the dial."""

    rate: float
    scale: str


CHOICE_FILE, VERDICTS_FILE = "choice.json", "verdicts.md"
DEFAULT = Choice(2e-4, "s10")


def phases_of(scale: str, quick: bool) -> list[Phase]:
    """Return the study's phases, the most important first."""
    if quick:
        return [Phase((f"{scale}+none+{{bf16,int4,int4_aligned}}",), range(3))]
    first = (f"{scale}+none+bf16", f"{scale}+{CORRECTIONS}+int4", f"{scale}+none+int4_aligned")
    others = ",".join(one for one in SCALES if one not in ("s4", scale))
    return [
        Phase(first, range(5)),
        Phase(first, range(5, 10)),
        Phase(("s4+none+bf16", f"s4+{CORRECTIONS}+int3", "s4+none+int3_aligned"), range(5)),
        Phase(
            (f"{scale}+none+fp8_{{block,unified}}", f"{{cosine,one_update,unscaled}}+{scale}+none+{{bf16,int4}}"),
            range(5),
        ),
        Phase((f"{{{others}}}+none+{{bf16,int4}}",), range(5)),
    ]


def make_models(out: Path) -> None:
    """Write the dialled policies that are not there."""
    for name, scale in SCALES.items():
        folder = out / "models" / name
        if not (folder / "config.json").is_file():
            arguments = ["--model", str(ROOT / "models" / "tiny-prefix-sum"), "--output", str(folder)]
            if dial.main([*arguments, "--scale", str(scale)]):
                raise SystemExit(2)


def jobs_of(
    study: studies.Study, phases: Sequence[Phase], out: Path, extra: Sequence[str], runs: str = "runs"
) -> list[studies.Job]:
    """Return the runs of all phases in their order, in a folder `runs` of `out`; their models are under `out` too."""
    found = []
    for phase in phases:
        arms = [arm for pattern in phase.arms for arm in studies.expand(pattern)]
        for job in studies.plan(study, out / runs, arms, phase.seeds, extra):
            scale = next(part for part in job.arm.split("+") if part in SCALES)
            arguments = (*job.arguments, "--model.policy.model", str(out / "models" / scale))
            found.append(studies.Job(job.arm, job.seed, job.folder, arguments, job.fingerprint))
    return found


def pilot_jobs(study: studies.Study, out: Path, extra: Sequence[str]) -> dict[float, list[studies.Job]]:
    """Return the pilot's runs by learning rate."""
    return {
        rate: jobs_of(
            study,
            [Phase(PILOT, PILOT_SEEDS)],
            out,
            [*rate_option(rate), "--trainer.max_epochs", str(PILOT_ITERATIONS), *extra],
            f"pilot/{rate:g}",
        )
        for rate in RATES
    }


def rate_option(rate: float) -> list[str]:
    """Return the arguments of a run that set its learning rate."""
    return ["--model.optimizer.init_args.lr", f"{rate:g}"]


def choose(outcomes: Mapping[float, Sequence[summary.Outcome]]) -> Choice:
    """Return the highest learning rate that a bf16 sampler bears, and the least mismatch that harms at it.

    Args:
        outcomes: of the pilot, by learning rate.
    """

    def mean(rate: float, *parts: str) -> float:
        found = [one.learner_accuracy for one in outcomes[rate] if set(parts) <= set(one.arm.split("+"))]
        return fmean(found) if found else 0.0

    rates = [rate for rate, there in outcomes.items() if there]
    borne = [rate for rate in rates if mean(rate, "bf16") >= HEALTHY]
    rate = max(borne) if borne else max(rates, key=lambda one: mean(one, "bf16"))
    losses = {scale: mean(rate, scale, "bf16") - mean(rate, scale, "int4") for scale in ("s8", "s10", "s12")}
    enough = [scale for scale, loss in losses.items() if loss >= LOSS]
    return Choice(rate, enough[0] if enough else max(losses, key=losses.__getitem__))


def run_until(jobs: Sequence[studies.Job], parallel: int, deadline: float, gpu: str = "") -> list[studies.Job]:
    """Run what is not finished until a deadline; return what failed.

    Args:
        jobs: in their order.
        parallel: runs at a time.
        deadline: on the monotonic clock.
        gpu: number of the one that all of them share; none by default.
    """
    waiting: Iterator[studies.Job] = iter([job for job in jobs if job.state != "finished"])
    running: dict[subprocess.Popen[bytes], tuple[studies.Job, float]] = {}
    failed, exhausted = [], False
    try:
        while running or not exhausted:
            late = time.monotonic() > deadline
            exhausted = exhausted or late
            while not exhausted and len(running) < parallel:
                job = next(waiting, None)
                exhausted = job is None
                if job is not None:
                    running[start(job, gpu)] = job, time.monotonic()
            for process in [one for one in running if one.poll() is not None]:
                job, begun = running.pop(process)
                seconds, ok = time.monotonic() - begun, process.returncode == 0
                print(f"{job.arm} seed {job.seed}: {seconds:.0f} s" + ("" if ok else " FAILED"), flush=True)
                if not ok:
                    failed.append(job)
                    print(*log_end(job), sep="\n    ", flush=True)
            if late:
                break
            time.sleep(POLL_SECONDS)
    finally:
        stop(list(running))
        if running:
            print(f"Time is up: {len(running)} runs were stopped.", flush=True)
    return failed


def log_end(job: studies.Job) -> list[str]:
    """Return the last lines of a run's log."""
    return (job.folder / studies.LOG_FILE).read_text(errors="replace").splitlines()[-studies.LOG_LINES :]


def start(job: studies.Job, gpu: str = "") -> subprocess.Popen[bytes]:
    """Start a run with one thread, on a GPU or none, its output in `log.txt`."""
    job.folder.mkdir(parents=True, exist_ok=True)
    studies.record(job)
    one_core = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": gpu}
    with (job.folder / studies.LOG_FILE).open("a") as log:
        command = [sys.executable, "-m", "lit_qrl.cli.main", *job.arguments]
        return subprocess.Popen(command, cwd=ROOT, env={**os.environ, **one_core}, stdout=log, stderr=log)


def stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask runs to save and end, and end those that do not."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
    until = time.monotonic() + STOP_SECONDS
    for process in processes:
        try:
            process.wait(max(until - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def pilot(study: studies.Study, out: Path, extra: Sequence[str], parallel: int, deadline: float) -> Choice:
    """Run what is left of the pilot, write its results and the choice, and return this."""
    by_rate = pilot_jobs(study, out, extra)
    # the rates in turn, so that a pilot on few cores that is cut has runs of all
    run_until([job for jobs in zip(*by_rate.values(), strict=True) for job in jobs], parallel, deadline)
    outcomes = {
        rate: summary.collect([job for job in jobs if job.state == "finished"]).outcomes
        for rate, jobs in by_rate.items()
    }
    if not any(outcomes.values()):
        raise SystemExit("No run of the pilot has finished: give it more time, or choose by --rate and --scale.")
    folder = out / "results"
    folder.mkdir(parents=True, exist_ok=True)
    summary.write_pilot(folder, outcomes)
    draw_pilot(folder)
    choice = choose(outcomes)
    (folder / CHOICE_FILE).write_text(json.dumps(asdict(choice)) + "\n")
    print(f"The pilot chooses a learning rate of {choice.rate:g} and the dial at {choice.scale}.", flush=True)
    return choice


def write(results: summary.Results, folder: Path, scale: str = DEFAULT.scale) -> str:
    """Write CSVs, tables, figures and what follows for the hypotheses into `folder`; return it as text."""
    text = summary.write(results, folder)
    results = summary.read(folder)
    lines = verdicts.verdicts(results, summary.compare(results), verdicts.scale_of(results) or scale)
    (folder / VERDICTS_FILE).write_text("\n".join(lines) + "\n")
    return "\n".join([text, *lines])


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    given, extra = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "evidence_study")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time (default: one for each core)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="time limit, the summary left out")
    parser.add_argument("--quick", action="store_true", help="bf16 sampler, no correction, aligned; 3 seeds; no pilot")
    parser.add_argument("--rate", type=float, default=DEFAULT.rate, help="learning rate, where there is no pilot")
    parser.add_argument("--scale", choices=("s8", "s10", "s12"), help="position of the dial, instead of a pilot")
    parser.add_argument("--pilot_only", action="store_true", help="choose, and run no more")
    parser.add_argument("--list", action="store_true", help="show the runs and their states, run nothing")
    parser.add_argument("--report", action="store_true", help="make tables and figure of what there is, run nothing")
    parser.add_argument("--before", type=Path, help="results of an earlier call, which are not run again")
    options = parser.parse_args(given)
    deadline = time.monotonic() + 60 * options.minutes
    out, study = options.out.resolve(), studies.load(HERE)
    earlier, choice = summary.Results(), Choice(options.rate, options.scale or DEFAULT.scale)
    for folder in (out / "results", options.before):
        if not options.scale and folder and (folder / CHOICE_FILE).is_file():
            choice = Choice(**json.loads((folder / CHOICE_FILE).read_text()))
    if options.before:
        earlier = summary.read(options.before)
    running = not (options.list or options.report)
    if running:
        make_models(out)
    if running and not (options.quick or options.scale or options.before):
        choice = pilot(study, out, extra, options.jobs, deadline)
    if options.pilot_only:
        return 0
    jobs = jobs_of(study, phases_of(choice.scale, options.quick), out, [*rate_option(choice.rate), *extra])
    jobs = [job for job in jobs if (job.arm, job.seed) not in earlier.finished]
    if options.list:
        for job in jobs:
            print(f"{job.state:<9} {job.arm} seed {job.seed}")
        return 0
    if running and any(job.state == "changed" for job in jobs):
        print(f"{out} holds runs of another configuration. Remove them, or choose another --out.", file=sys.stderr)
        return 2
    failed = run_until(jobs, options.jobs, deadline) if running else []
    results = summary.collect([job for job in jobs if job.state == "finished"]).joined(earlier)
    print(write(results, out / "results", choice.scale))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
