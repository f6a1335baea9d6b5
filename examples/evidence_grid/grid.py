"""Runs the grid behind docs/studies/evidence.md: mismatch, corrections, formats and habits, and what foretells a loss.

    python examples/evidence_grid/grid.py --jobs 28 --minutes 7.5 --out out/grid             # what comes first
    python examples/evidence_grid/grid.py --blocks habits int3 --before docs/figures/evidence/grid --out out/grid
    python examples/evidence_grid/grid.py --report --out out/grid                            # the CSVs and tables again

Each seed goes through the blocks in their order. A run that the time limit cuts after 60 of 80 iterations counts.
`replay` runs the first iterations of earlier studies' runs again: their ends are known, their metrics were not kept.
The same command goes on where it was cut; `--before FOLDER` joins the results of another machine.
"""

import argparse
import csv
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
EVIDENCE = HERE.parent / "evidence_study"
sys.path[:0] = [str(HERE), str(EVIDENCE), str(HERE.parent), str(HERE.parent / "mismatch_dial")]

import dial  # noqa: E402
import grid_figure  # noqa: E402
import grid_table  # noqa: E402
import run as evidence  # noqa: E402
import study as studies  # noqa: E402

ROOT = HERE.parents[1]
SHIPPED = ROOT / "docs" / "figures" / "evidence"
SCALES = (1, 4, 6, 8, 10, 12, 13)
ITERATIONS, REPLAYED = 80, 10
SHORTEST = 60
"""Iterations from which a run that the time limit has cut counts."""
CONTROL = "s8+none+bf16"
"""The bf16 sampler of all positions of the dial: 8 is a power of two, so it changes no bit of the function."""


SEEDS = (10, 11, 12)
BLOCKS = {
    "levels": (CONTROL, "{s4,s6,s8,s12,s13}+{none,tis,ais,sequence_tis}+int4"),
    "rejection": (CONTROL, "s10+{geo,geo_wide,ais_geo}+int4"),
    "int3": (CONTROL, "s4+{none,ais,sequence_tis}+int3", "s4+none+int3_aligned"),
    "updates": (CONTROL, "s10+none+int4", "{one_update,eight_updates}+s10+none+{bf16,int4}"),
    "gate": (CONTROL, "s10+{ais,tis5,ais_always,ais_undamped}+int4"),
    "products": (CONTROL, "s1+none+{int4,fp8_block,nvfp4,mxfp4,w4a8}"),
    "slow": ("slow+s8+none+bf16", "slow+{s8,s10,s12}+{none,tis,sequence_tis}+int4"),
    "habits": (CONTROL, "s10+none+int4", "{cosine,unscaled,adam_eps,decay}+s10+none+{bf16,int4}"),
    "damping": (CONTROL, "s10+none+int4", "{adam_eps,decay}+s10+none+{bf16,int4}"),
    "aligned": (CONTROL, "{s6,s8,s12,s13}+none+int4_aligned"),
    "four_bits": (CONTROL, "{s1,s4}+none+w4a4"),
    "tbpo": (CONTROL, "{s6,s8}+none+int4", "s10+none+int4", "{s6,s8,s10}+tbpo+int4"),
    "cache": (CONTROL, "s1+none+{fp8_cache,fp8_block_cache}", "s1+{none,tis,ais,sequence_tis}+{cache14,cache15}"),
    "masks": (CONTROL, "{s6,s8,s12}+{mis,sequence_mis,geo_wide,ais_geo}+int4"),
    "repeated": (
        "{one_update,eight_updates}+s10+none+bf16",
        "{one_update,eight_updates}+s10+{none,tis,ais,sequence_tis}+int4",
    ),
    "noise": (CONTROL, "s1+none+nvfp4", "s1+aqn+{bf16,nvfp4}", "s8+none+int4", "s8+aqn+int4"),
}
"""What is run together, the most important first: arms, with alternatives in braces."""


@dataclass(frozen=True)
class Planned:
    """A run, and where it stands in the grid's table: the study it belongs to and its learning rate."""

    study: str
    rate: float
    job: studies.Job


def settings() -> studies.Study:
    """Return the grid with the settings that every run of the evidence study has."""
    return replace(studies.load(HERE), common=studies.load(EVIDENCE).common)


def make_models(out: Path) -> None:
    """Write the dialled policies that are not there."""
    for scale in SCALES:
        folder = out / "models" / f"s{scale}"
        if not (folder / "config.json").is_file():
            arguments = ["--model", str(ROOT / "models" / "tiny-prefix-sum"), "--output", str(folder)]
            if dial.main([*arguments, "--scale", str(scale)]):
                raise SystemExit(2)


def of_block(arms: Sequence[str], seeds: Sequence[int], out: Path, extra: Sequence[str] = ()) -> list[Planned]:
    """Return a block's runs, seed by seed, in the order of its arms."""
    names = [arm for pattern in arms for arm in studies.expand(pattern)]
    limit = ["--trainer.max_epochs", str(ITERATIONS), *extra]
    jobs = studies.plan(settings(), out / "runs", names, seeds, limit)
    return [Planned("grid", 1e-4 if "slow" in job.arm.split("+") else 2e-4, dialled(job, out)) for job in jobs]


def dialled(job: studies.Job, out: Path) -> studies.Job:
    """Return the run with the policy of its arm's position of the dial."""
    scale = next(part for part in job.arm.split("+") if part in {f"s{scale}" for scale in SCALES})
    return replace(job, arguments=(*job.arguments, "--model.policy.model", str(out / "models" / scale)))


def replays(out: Path) -> list[Planned]:
    """Return the first iterations of the earlier runs of a plain learner with a low-precision sampler, one of each."""
    study, found = studies.load(EVIDENCE), []
    short = ["--trainer.max_epochs", str(REPLAYED)]
    for name in ("runs", "pilot"):
        with (SHIPPED / f"{name}.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        arms: dict[float, dict[str, set[int]]] = {}
        for row in rows:
            if not row["arm"].endswith(("bf16", "aligned")):
                rate = float(row.get("rate", evidence.DEFAULT.rate))
                arms.setdefault(rate, {}).setdefault(row["arm"], set()).add(int(row["seed"]))
        for rate, there in arms.items():
            options = [*evidence.rate_option(rate), *short]
            seeds = sorted(set().union(*there.values()))
            jobs = studies.plan(study, out / "replay" / name / f"{rate:g}", list(there), seeds, options)
            found += [Planned(name, rate, dialled(job, out)) for job in jobs if job.seed in there[job.arm]]
    return found


def counts(job: studies.Job) -> bool:
    """Return whether a run has an end: its own, or where a time limit has cut it late enough."""
    return job.state == "finished" or (job.state == "cut" and grid_table.Run(job.folder).iterations >= SHORTEST)


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    given, extra = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "evidence_grid")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time (default: one for each core)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="time limit, the summary left out")
    parser.add_argument("--blocks", nargs="+", choices=("replay", *BLOCKS), default=["replay", *BLOCKS])
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="one after the other, each in all blocks")
    parser.add_argument("--list", action="store_true", help="show the runs and their states, run nothing")
    parser.add_argument("--report", action="store_true", help="write what there is, run nothing")
    parser.add_argument("--before", type=Path, help="results of an earlier call, which are not run again")
    options = parser.parse_args(given)
    deadline, out = time.monotonic() + 60 * options.minutes, options.out.resolve()
    earlier = grid_table.read(options.before / grid_table.RUNS_FILE) if options.before else []
    running = not (options.list or options.report)
    if running:
        make_models(out)
    offered = replays(out) if "replay" in options.blocks else []
    for seed in options.seeds:
        for name in (name for name in BLOCKS if name in options.blocks):
            offered += of_block(BLOCKS[name], [seed], out, extra)
    planned: dict[tuple[object, ...], Planned] = {}
    known = {grid_table.key(row) for row in earlier}
    for one in offered:
        place = (one.study, one.rate, one.job.arm, one.job.seed)
        if place not in known:
            planned.setdefault(place, one)
    if options.list:
        for one in planned.values():
            print(f"{one.job.state:<9} {one.study} {one.rate:g} {one.job.arm} seed {one.job.seed}")
        return 0
    if running and any(one.job.state == "changed" for one in planned.values()):
        print(f"{out} holds runs of another configuration. Remove them, or choose another --out.", file=sys.stderr)
        return 2
    failed = evidence.run_until([one.job for one in planned.values()], options.jobs, deadline) if running else []
    rows = [*earlier, *(grid_table.row(one.study, one.rate, one.job) for one in planned.values() if counts(one.job))]
    print(grid_table.write(rows, out / "results"), flush=True)
    of_grid = [one.job for one in planned.values() if one.study == "grid" and counts(one.job)]
    grid_table.write_curves(of_grid, out / "results", (options.before or out) / grid_table.CURVES_FILE)
    grid_figure.draw(rows, SHIPPED, out / "results" / grid_figure.FIGURE_FILE)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
