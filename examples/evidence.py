"""Everything behind docs/studies/evidence.md by one command: its studies, and its tables and figures from their CSVs.

    python examples/evidence.py --jobs 16 --minutes 240 --gpu 0    # all studies in turn; the same command goes on
    python examples/evidence.py --missing --jobs 16 --minutes 30   # what the page calls not run, beside what it has
    python examples/evidence.py --report                           # tables and figures again, from the CSVs of the page

Runs take one core and one to three minutes each, 400 in all; the study of long reasoning takes a GPU, and is left out
without one. What there is by the end of the time is in OUT/evidence, as docs/figures/evidence, beside a page with its
tables. `--report` writes over docs/studies/evidence.md and its folder; `--folder` and `--page` name others.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDERS = ("evidence_grid", "evidence_study", "long_reasoning", "mismatch_dial", "")
sys.path[:0] = [str(HERE / name) for name in FOLDERS]

import alpha_figure  # noqa: E402
import arms as long_reasoning  # noqa: E402
import evidence_tables  # noqa: E402
import figure as long_figure  # noqa: E402
import grid_figure  # noqa: E402
import grid_table  # noqa: E402
import odds  # noqa: E402
import run as study  # noqa: E402
import summary  # noqa: E402
from pilot_figure import draw_pilot  # noqa: E402

SHIPPED, PAGE = evidence_tables.SHIPPED, evidence_tables.PAGE
SEEDS = ("11", "12", "10", "13", "14")
"""Of the grid, in the order in which they were run."""
RATES = ("3e-6", "1e-5", "3e-5")
LONG_ARMS = (
    "s1+none+bf16",
    "DIAL+{none,tis,sequence_tis,sequence_mis,ais,gspo,tbpo,aqn}+int4",
    "DIAL+none+int4_aligned",
)
LONG_ARMS = (*LONG_ARMS, "s1+none+{nvfp4,fp8_cache}", "s1+sequence_tis+bf16")
COPIED = ("pilot.csv", "choice.json", "runs.csv", "curves.csv")
LONG_COPIED = (long_reasoning.CURVES_FILE, long_reasoning.PROBE_FILE, long_reasoning.PILOT_FILE)


def steps(out: Path, jobs: int, gpu: str, missing: bool) -> dict[str, list[list[str]]]:
    """Return the commands of each study, without their time limit, in the order in which they are run.

    Args:
        out: folder of all of them.
        jobs: runs at a time.
        gpu: that the study of long reasoning takes; empty leaves it out.
        missing: run what the page lacks alone.
    """
    parallel, adder = ["--jobs", str(jobs)], str(out / "long" / "adder")
    known = ["--before", str(SHIPPED / "long")] if missing else ["--rates", *RATES]
    found = {"study": [["evidence_study/run.py", "--out", str(out / "study"), *parallel]]}
    found["grid"] = [["evidence_grid/grid.py", "--out", str(out / "grid"), "--seeds", *SEEDS, *parallel]]
    if missing:
        rest = ["evidence_grid/rest.py", "--out", str(out / "rest"), "--before", str(SHIPPED), *parallel]
        found = {"study and grid": [rest]}
    if gpu:
        warm = [] if (out / "long" / "adder" / "config.json").is_file() else [["long_reasoning/warm_start.py"]]
        arms = ["long_reasoning/arms.py", "--out", str(out / "long"), *parallel, "--gpu", gpu, *known]
        found["long reasoning"] = [[*one, "--output", adder] for one in warm] + [[*arms, "--arms", *LONG_ARMS]]
    return found


def run_all(studies: dict[str, list[list[str]]], deadline: float) -> list[str]:
    """Run each command with the time that is left, and return the studies of which one failed."""
    failed = []
    for number, (name, commands) in enumerate(studies.items(), 1):
        for command in commands:
            left = (deadline - time.monotonic()) / 60
            if left <= 0:
                print(f"[{number}/{len(studies)}] {name}: no time is left.", flush=True)
                break
            limit = [] if left == float("inf") or "--jobs" not in command else ["--minutes", f"{left:.2f}"]
            print(f"[{number}/{len(studies)}] {name}: {' '.join([*command, *limit])}", flush=True)
            script, *arguments = [*command, *limit]
            if subprocess.run([sys.executable, str(HERE / script), *arguments], cwd=HERE.parent).returncode:
                failed.append(name)
                break
    return failed


def gather(out: Path, folder: Path) -> None:
    """Lay the CSVs of all studies into one folder, as docs/figures/evidence has them; what is missing is the page's."""
    shutil.copytree(SHIPPED, folder, dirs_exist_ok=True)
    for found, files, target in (
        (out / "study" / "results", COPIED, folder),
        (out / "grid" / "results", (grid_table.RUNS_FILE, grid_table.CURVES_FILE), folder / "grid"),
        (out / "rest" / "results", COPIED, folder),
        (out / "rest" / "results" / "grid", (grid_table.RUNS_FILE, grid_table.CURVES_FILE), folder / "grid"),
        (out / "long" / "results", LONG_COPIED, folder / "long"),
    ):
        for name in files:
            if (found / name).is_file():
                shutil.copy(found / name, target / name)


def rebuild(folder: Path, page: Path) -> list[str]:
    """Write every table and figure of a folder from its CSVs, and the tables of a page.

    Args:
        folder: with the CSVs, as docs/figures/evidence.
        page: as docs/studies/evidence.md.

    Returns:
        What the page's decisions say that its sections do not.
    """
    results = summary.read(folder)
    study.write(results, folder)
    (folder / summary.SETTINGS_FILE).unlink(missing_ok=True)  # which the page does not show
    draw_pilot(folder)
    grid = folder / "grid"
    rows = grid_table.read(grid / grid_table.RUNS_FILE)
    grid_table.write(rows, grid)
    grid_figure.draw(rows, folder, grid / grid_figure.FIGURE_FILE)
    alpha_figure.draw(grid / grid_table.CURVES_FILE, grid / alpha_figure.FIGURE_FILE)
    odds.main(["--earlier", str(folder), "--grid", str(grid)])
    long = folder / "long"
    curves = long_reasoning.read(long / long_reasoning.CURVES_FILE)
    long_reasoning.write(curves, long)
    long_figure.draw(long_reasoning.compared(curves), long / long_reasoning.FIGURE_FILE)
    text = evidence_tables.written(page.read_text(), folder)
    page.write_text(text)
    return evidence_tables.unsupported(text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE.parent / "runs" / "evidence")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time (default: one a core)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="time limit of all studies together")
    parser.add_argument("--gpu", default="", help="number of the GPU for long reasoning; none by default")
    parser.add_argument("--missing", action="store_true", help="run what the page has no run of, and join the two")
    parser.add_argument("--list", action="store_true", help="show the commands, run nothing")
    parser.add_argument("--report", action="store_true", help="tables and figures alone")
    parser.add_argument("--folder", type=Path, default=SHIPPED, help="of the CSVs, for --report")
    parser.add_argument("--page", type=Path, default=PAGE, help="for --report")
    options = parser.parse_args(arguments)
    if options.report:
        unsupported = rebuild(options.folder, options.page)
        print(*unsupported, sep="\n")
        return 1 if unsupported else 0
    out = options.out.resolve()
    commands = steps(out, options.jobs, options.gpu, options.missing)
    if options.list:
        print(*(" ".join(command) for there in commands.values() for command in there), sep="\n")
        return 0
    if not options.gpu:
        print("Long reasoning is left out: it takes a GPU (--gpu 0).", flush=True)
    failed = run_all(commands, time.monotonic() + 60 * options.minutes)
    gather(out, out / "evidence")
    shutil.copy(PAGE, out / "evidence.md")
    print(*rebuild(out / "evidence", out / "evidence.md"), sep="\n")
    print(f"{out / 'evidence.md'} has the tables of what there is." + (f" Failed: {failed}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
