"""Accuracy of the quickstart when rollouts are drawn ahead: every schedule with and without a correction, over seeds.

    python benchmarks/schedules.py --out out/schedules --workers 12 --limit 420

Each run is the command that a user would type, one thread for the learner and one for its engine's process. Runs whose
folder holds a result are not made again, and none is begun that would pass the limit. `async` with a staleness of 1 is
`one_step_off`.
"""

import argparse
import csv
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCHEDULES: dict[str, dict[str, Any]] = {
    "on_policy": {"data.schedule": "on_policy"},
    "one_step_off": {"data.schedule": "one_step_off"},
    "async_4": {"data.schedule": "async", "data.max_staleness": 4},
    "in_flight_4": {"data.schedule": "async", "data.max_staleness": 4, "data.in_flight_updates": "keep"},
}
CORRECTIONS = ("none", "tis")
SHOWN = ("mismatch/kl_k3", "mismatch/staleness_kl", "rollout/age", "time/iteration")


def main() -> None:
    """Make the runs that lack a result, and print one table of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1, help="runs at a time, each on two cores")
    parser.add_argument("--limit", type=float, default=420, help="seconds after which no run goes on")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--iterations", type=int, default=150)
    args = parser.parse_args()
    deadline = time.monotonic() + args.limit
    # Weights in flight come last: what is cut off by the limit is theirs.
    cells = sorted(product(range(args.seeds), SCHEDULES, CORRECTIONS), key=lambda cell: "in_flight" in cell[1])
    with ThreadPoolExecutor(args.workers) as pool:
        results = list(pool.map(lambda cell: run(args, *cell, deadline), cells))
    table(args.out, [one for one in results if one is not None])


def run(args: argparse.Namespace, seed: int, schedule: str, correction: str, deadline: float) -> dict[str, Any] | None:
    """Return the result of one run, or None where there was no time for it."""
    name = f"{schedule}-{correction}-{seed}"
    result, folder = args.out / f"{name}.json", args.out / "runs" / name
    if result.exists():
        return json.loads(result.read_text())
    left = deadline - time.monotonic()
    if left < 5:
        return None
    args.out.mkdir(parents=True, exist_ok=True)
    options = {
        "seed_everything": seed,
        "model.policy.model": "models/tiny-countdown",
        "data.engine": "RemoteVLLMEngine",
        **SCHEDULES[schedule],
        "model.optimizer.lr": args.lr,
        "trainer.max_epochs": args.iterations,
        "trainer.enable_progress_bar": "false",
        "trainer.default_root_dir": folder,
        "checkpoint.every_n_iterations": 0,
    }
    configs = ["configs/quickstart.yaml", f"configs/correction/{correction}.yaml"]
    command = [sys.executable, "-m", "lit_qrl.cli", "fit"]
    command += [part for config in configs for part in ("--config", str(ROOT / config))]
    command += [part for key, value in options.items() for part in (f"--{key}", str(value))]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was cut short
    log = args.out / f"{name}.log"
    with log.open("w") as file:
        try:
            subprocess.run(command, stdout=file, stderr=file, env=environment, cwd=ROOT, check=True, timeout=left)
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            print(name, type(error).__name__, log.read_text()[-400:], flush=True)
            return None
    rows = list(csv.DictReader((folder / "metrics.csv").open()))
    accuracy = [float(row["val/accuracy"]) for row in rows if row.get("val/accuracy")]
    given = {key: [float(row[key]) for row in rows if row.get(key)] for key in SHOWN}
    means = {key: statistics.mean(values) for key, values in given.items() if values}
    found = {"schedule": schedule, "correction": correction, "seed": seed, "accuracy": accuracy, **means}
    result.write_text(json.dumps(found))
    log.unlink()
    print(name, accuracy[-1:], flush=True)
    return found


def table(out: Path, results: list[dict[str, Any]]) -> None:
    """Print, and write as a file, the last accuracy of each arm: mean and standard error over seeds."""
    lines = [
        "| schedule | correction | runs | accuracy | KL to the sampler | of it staleness | seconds an iteration |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for schedule, correction in product(SCHEDULES, CORRECTIONS):
        own = [one for one in results if (one["schedule"], one["correction"]) == (schedule, correction)]
        if not own:
            continue
        last = [one["accuracy"][-1] for one in own]
        error = statistics.stdev(last) / len(last) ** 0.5 if len(last) > 1 else float("nan")

        def mean(key: str, own: list[dict[str, Any]] = own) -> float:
            return statistics.mean(one.get(key, float("nan")) for one in own)

        figures = f"{mean('mismatch/kl_k3'):.5f} | {mean('mismatch/staleness_kl'):.5f} | {mean('time/iteration'):.2f}"
        lines.append(
            f"| {schedule} | {correction} | {len(own)} | {statistics.mean(last):.3f} ± {error:.3f} | {figures} |"
        )
    print("\n".join(lines))
    (out / "table.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
