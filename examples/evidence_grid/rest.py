"""Runs what docs/studies/evidence.md still calls not run, on CPUs, what decides most first: the study, then the grid.

    python examples/evidence_grid/rest.py --jobs 20 --minutes 7 --out out/rest       # until the time is up
    python examples/evidence_grid/rest.py --jobs 20 --minutes 7 --out out/rest \
        --before out/earlier                                                         # results of another machine
    python examples/evidence_grid/rest.py --report --out out/rest                    # the CSVs and tables again

Runs that docs/figures/evidence has are not run again. Results are `OUT/results` (of the study, with what there was) and
`OUT/results/grid` (of the grid). The same command goes on where it was cut.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import alpha_figure  # noqa: E402
import grid  # noqa: E402
import grid_table  # noqa: E402
import summary  # noqa: E402  (grid has made its folder known)
from grid import SHIPPED, Planned, evidence, studies  # noqa: E402

OF_STUDY = {
    "habits": ("{cosine,one_update,unscaled}+s10+none+{bf16,int4}",),
    "fp8": ("s10+none+bf16", "s10+none+fp8_{block,unified}"),
    "int3_study": ("s4+none+{bf16,int3}",),
    "first": (
        "s10+none+bf16",
        "s10+{none,tis,mis,sequence_tis,sequence_mis,ais,ais_fitted}+int4",
        "s10+none+int4_aligned",
    ),
}
ORDER: tuple[tuple[str, int], ...] = (
    *(("habits", seed) for seed in (0, 1, 2)),
    ("aligned", 11),
    ("aligned", 12),
    *(("fp8", seed) for seed in (0, 1, 2)),
    *(("habits", seed) for seed in (3, 4)),
    *(("four_bits", seed) for seed in (11, 12)),
    ("tbpo", 11),
    ("noise", 11),
    ("slow", 11),
    ("gate", 12),
    ("damping", 11),
    ("levels", 12),
    ("tbpo", 12),
    ("noise", 12),
    ("int3", 12),
    ("updates", 12),
    ("rejection", 12),
    *(("fp8", seed) for seed in (3, 4)),
    ("products", 12),
    ("slow", 12),
    ("damping", 12),
    *(("cache", seed) for seed in (11, 12)),
    *(("int3_study", seed) for seed in (0, 1, 2)),
    *(("repeated", seed) for seed in (11, 12)),
    ("masks", 11),
    *(("first", seed) for seed in (8, 9)),
    ("masks", 12),
    *(("levels", seed) for seed in (13, 14)),
    *(("int3_study", seed) for seed in (3, 4)),
    *((block, 13) for block in ("aligned", "products", "slow", "damping", "int3", "tbpo")),
)
"""What is run, the most important first: a block and a seed; those of the study have 240 iterations."""


def planned(out: Path, extra: Sequence[str], blocks: Sequence[str] = ()) -> list[Planned]:
    """Return all runs in their order, each once; where blocks are named, theirs."""
    study, found = studies.load(grid.EVIDENCE), {}
    for block, seed in ORDER:
        if blocks and block not in blocks:
            continue
        if block in OF_STUDY:
            options = [*evidence.rate_option(evidence.DEFAULT.rate), *extra]
            jobs = evidence.jobs_of(study, [evidence.Phase(OF_STUDY[block], (seed,))], out, options, "study")
            there = [Planned("runs", evidence.DEFAULT.rate, job) for job in jobs]
        else:
            there = grid.of_block(grid.BLOCKS[block], [seed], out, extra)
        for one in there:
            found.setdefault((one.study, one.rate, one.job.arm, one.job.seed), one)
    return list(found.values())


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    given, extra = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=grid.ROOT / "runs" / "evidence_rest")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time (default: one for each core)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="time limit, the summary left out")
    parser.add_argument("--blocks", nargs="+", choices=sorted({block for block, _ in ORDER}), default=[])
    parser.add_argument("--list", action="store_true", help="show the runs and their states, run nothing")
    parser.add_argument("--report", action="store_true", help="write what there is, run nothing")
    parser.add_argument("--before", type=Path, default=SHIPPED, help="results of an earlier call, not run again")
    options = parser.parse_args(given)
    deadline, out = time.monotonic() + 60 * options.minutes, options.out.resolve()
    study_before = summary.read(options.before)
    grid_before = grid_table.read(options.before / "grid" / grid_table.RUNS_FILE)
    known = {grid_table.key(row) for row in grid_before if row["study"] == "grid"}
    known |= {("runs", evidence.DEFAULT.rate, arm, seed) for arm, seed in study_before.finished}
    running = not (options.list or options.report)
    if running:
        grid.make_models(out)
    wanted = [
        one
        for one in planned(out, extra, options.blocks)
        if (one.study, one.rate, one.job.arm, one.job.seed) not in known
    ]
    if options.list:
        for one in wanted:
            print(f"{one.job.state:<9} {one.study} {one.rate:g} {one.job.arm} seed {one.job.seed}")
        return 0
    if running and any(one.job.state == "changed" for one in wanted):
        print(f"{out} holds runs of another configuration. Remove them, or choose another --out.", file=sys.stderr)
        return 2
    failed = evidence.run_until([one.job for one in wanted], options.jobs, deadline) if running else []
    of_study = [one.job for one in wanted if one.study == "runs" and one.job.state == "finished"]
    results = summary.collect(of_study).joined(study_before)
    print(evidence.write(results, out / "results"), flush=True)
    rows = [
        grid_table.row(one.study, one.rate, one.job) for one in wanted if one.study == "grid" and grid.counts(one.job)
    ]
    print(grid_table.write([*grid_before, *rows], out / "results" / "grid"), flush=True)
    of_grid = [one.job for one in wanted if one.study == "grid" and (one.job.folder / studies.COMMAND_FILE).is_file()]
    grid_table.write_curves(of_grid, out / "results" / "grid", options.before / "grid" / grid_table.CURVES_FILE)
    curves = out / "results" / "grid" / grid_table.CURVES_FILE
    alpha_figure.draw(curves, curves.with_name(alpha_figure.FIGURE_FILE))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
