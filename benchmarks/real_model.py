"""Whole runs on real weights, timed from outside: accuracy by iteration and by the wall clock, beside TRL's.

    python benchmarks/real_model.py --model FOLDER --data FOLDER --arms bf16 fp8_row+ais trl --out out/real

FOLDER of the data has `train.jsonl` and `test.jsonl` with GSM8K's columns. An arm is the command that a user types:
`lit-qrl fit --config configs/real/gsm8k.yaml` and the fragments below, or `trl_real_model.py`, the same task and sizes
with TRL's trainer and its vLLM in the same process. This process starts them one after another, or, with `--gpus 0 1`,
one on each GPU at a time, reads `metrics.csv` as it grows and asks the driver for memory and load; seconds count from
the start of the command. `--side_by_side 3` lets three share a GPU, for accuracies alone. A setting follows an arm
behind a comma: `bf16,data.engine.batch_invariant=true`. `--draw` makes the figure of
docs/studies/real_model.md from what `--out` holds.
"""

import argparse
import csv
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BASE = "configs/real/gsm8k.yaml"
VLLM = "configs/engine/vllm.yaml"
ARMS: dict[str, list[str]] = {
    "bf16": [],
    "bf16+vllm": [VLLM],
    "fp8_row": [VLLM, "configs/precision/rollout_fp8_row.yaml"],
    "fp8_row+ais": [VLLM, "configs/precision/rollout_fp8_row.yaml", "configs/correction/ais.yaml"],
    "fp8_row+aligned": [VLLM, "configs/precision/qat_fp8_row.yaml"],
    "int4+aligned": [VLLM, "configs/precision/qat_int4_group.yaml"],
    "lora": ["configs/real/lora.yaml"],
    "lora+nvfp4": [VLLM, "configs/real/lora.yaml", "configs/precision/nvfp4_lora.yaml"],
    "trl": [],
    "trl+lora": ["configs/real/lora.yaml"],
}
NAMES = {"bf16": "lit_qrl, bf16 sampler", "fp8_row+ais": "lit_qrl, FP8 vLLM and AIS", "trl": "TRL, bf16 vLLM"}
"""What the figure calls an arm."""
REACHED = 0.40
"""The accuracy whose time is told."""
COLUMNS = {"greedy": "val/greedy_pass@1", "greedy_stopped": "val/greedy_stopped", "sampled": "val/accuracy"}
COLUMNS |= {"stopped": "val/stopped"}


def command(args: argparse.Namespace, arm: str, seed: int, run: Path) -> list[str]:
    """Return what is typed for a run; a setting behind the arm's name, as in `bf16,lr=1e-6`, is a further option."""
    name, *settings = arm.split(",")
    files = [part for file in (BASE, *ARMS[name]) for part in ("--config", str(ROOT / file))]
    data = {"model.policy.model": args.model, "trainer.max_epochs": args.iterations, "seed_everything": seed}
    data |= {"trainer.check_val_every_n_epoch": args.every, "trainer.default_root_dir": run}
    task = {"path": args.data / "train.jsonl", "evaluation_path": args.data / "test.jsonl", "subset": "null"}
    data |= {f"data.task.{key}": value for key, value in task.items()}
    words = [word for key, value in data.items() for word in (f"--{key}", str(value))]
    words += [word for one in settings for word in (f"--{one.split('=')[0]}", one.split("=")[1])]
    if name.startswith("trl"):
        return [sys.executable, str(ROOT / "benchmarks" / "trl_real_model.py"), *files, *words]
    return [sys.executable, "-m", "lit_qrl.cli", "fit", *files, *words, *args.set]


def read(path: Path) -> list[dict[str, float]]:
    """Return the rows of a `metrics.csv`, without what is empty."""
    if not path.exists():
        return []
    with path.open() as file:
        return [{key: float(value) for key, value in row.items() if key and value} for row in csv.DictReader(file)]


class Run:
    """A command under way, and what was seen of it.

    Args:
        args: the arguments.
        arm: its name.
        seed: of the run.
        gpu: number of its GPU.
    """

    def __init__(self, args: argparse.Namespace, arm: str, seed: int, gpu: int) -> None:
        self.arm, self.seed, self.gpu = arm, seed, gpu
        self.folder = args.out / f"{arm.replace(',', '_')}-{seed}"
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self.log = self.folder.with_name(self.folder.name + ".log")
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path[1:]])
        self.began = time.monotonic()
        with self.log.open("wb") as log:
            words = command(args, arm, seed, self.folder)
            self.process = subprocess.Popen(words, stdout=log, stderr=log, env=environment)
        self.seen: dict[int, float] = {}
        self.memory: list[float] = []
        self.load: list[float] = []
        self.ended = 0.0

    def look(self) -> bool:
        """Note rows that are new, memory and load; return whether the command goes on."""
        now = time.monotonic() - self.began
        for number in range(len(self.seen), len(read(self.folder / "metrics.csv"))):
            self.seen[number] = now
        going = self.process.poll() is None
        self.ended = self.ended or (0.0 if going else now)
        return going

    def result(self, alone: bool) -> dict[str, Any]:
        """Return the figures: points of evaluations, ends of iterations in seconds since the command began."""
        rows = read(self.folder / "metrics.csv")
        points, ends = [], []
        for number, row in enumerate(rows):
            if "time/iteration" in row:
                ends.append(self.seen[number])
            if COLUMNS["greedy"] in row:
                found = {name: row[column] for name, column in COLUMNS.items() if column in row}
                after = row["epoch"] + 1 if "epoch" in row and points else row.get("iteration", 0)
                points.append({"iteration": int(after), "seconds": round(self.seen[number], 1), **found})
        return {
            "arm": self.arm,
            "seed": self.seed,
            "alone": alone,
            "status": self.process.returncode,
            "points": points,
            "ends": [round(end, 2) for end in ends],
            "reward": [round(row["reward/mean"], 4) for row in rows if "reward/mean" in row],
            "kl": [round(row["mismatch/kl_k3"], 6) for row in rows if "mismatch/kl_k3" in row],
            "seconds": round(self.ended, 1),
            "peak_gib": round(max(self.memory, default=0.0), 1) if alone else None,
            "load": round(statistics.mean(self.load), 1) if alone and self.load else None,
        }


def watched(runs: Sequence[Run], deadline: float) -> None:
    """Look at the runs until all have ended, or until the deadline, at which they are ended by SIGTERM."""
    for tick in itertools.count():
        going = [run for run in runs if run.look()]
        if not going:
            return
        if time.monotonic() > deadline:
            for run in going:
                run.process.terminate()
            deadline += 45
        if tick % 10 == 0:
            for run, (memory, load) in zip(going, driver([run.gpu for run in going]), strict=False):
                run.memory.append(memory)
                run.load.append(load)
        time.sleep(0.1)


def driver(gpus: Sequence[int]) -> Iterator[tuple[float, float]]:
    """Yield GiB in use and load in percent of each GPU, as the driver says; nothing without one."""
    try:
        words = ["nvidia-smi", "--query-gpu=memory.used,utilization.gpu", "--format=csv,noheader,nounits"]
        lines = subprocess.run(words, capture_output=True, text=True).stdout.splitlines()
    except FileNotFoundError:
        return
    for gpu in gpus:
        memory, load = lines[gpu].split(",")
        yield float(memory) / 1024, float(load)


def line(result: dict[str, Any]) -> str:
    """Return a run as a row of the table."""
    points = result["points"]
    reached = next((f"{one['seconds']:.0f} s" for one in points if one["greedy"] >= REACHED), "not")
    between = [later - earlier for earlier, later in itertools.pairwise(result["ends"])]
    pace = f"{statistics.median(between):.2f} s" if between else "-"
    curve = " ".join(f"{one['iteration']}:{one['greedy']:.3f}" for one in points)
    ended = " ".join(f"{one['greedy_stopped']:.2f}" for one in points if "greedy_stopped" in one)
    first = f"{result['ends'][0]:.0f} s" if result["ends"] else "-"
    cells = (result["arm"], result["seed"], curve, ended, reached, first, pace, f"{result['seconds']:.0f} s")
    return " | ".join(map(str, (*cells, result["peak_gib"], result["load"], result["status"])))


HEAD = (
    "arm | seed | greedy accuracy | share that stopped | to 0.40 | first iteration | median iteration | in all | GiB | "
    "load % | status"
)


def draw(out: Path, target: Path) -> None:
    """Draw accuracy by iteration and by seconds of all runs in the folder."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    results = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
    names = list(dict.fromkeys(one["arm"] for one in results))
    figure, axes = plt.subplots(1, 2, figsize=(9.6, 3.4), sharey=True, layout="constrained")
    labels = {"iteration": "iteration", "seconds": "seconds since the command was typed"}
    for axis, (key, label) in zip(axes, labels.items(), strict=True):
        for number, result in enumerate(results):
            if key == "seconds" and not result["alone"]:
                continue
            first = next(other for other, one in enumerate(results) if one["arm"] == result["arm"]) == number
            x, y = ([one[what] for one in result["points"]] for what in (key, "greedy"))
            shown = NAMES.get(result["arm"], result["arm"]) if first else None
            style = {"linestyle": "-" if first else "--", "color": f"C{names.index(result['arm'])}"}
            axis.plot(x, y, marker="o", markersize=3.5, label=shown, **style)
        axis.set_xlabel(label)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.3)
    axes[0].set_ylabel("greedy accuracy on GSM8K")
    axes[0].legend(frameon=False, loc="lower right")
    figure.savefig(target, dpi=150)


def main() -> None:
    """Run the arms and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen2.5-Coder-0.5B-Instruct", help="a folder, or a name on the hub")
    parser.add_argument("--data", type=Path, help="folder of train.jsonl and test.jsonl")
    parser.add_argument("--arms", nargs="+", default=["bf16", "fp8_row+ais", "trl"], help=f"of {', '.join(ARMS)}")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--every", type=int, default=25, help="iterations between two evaluations")
    parser.add_argument("--gpus", nargs="+", type=int, default=[0])
    parser.add_argument("--side_by_side", type=int, default=1, help="runs that share a GPU")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which the runs under way end")
    parser.add_argument("--set", nargs=argparse.REMAINDER, default=[], help="further words for `lit-qrl fit`, last")
    parser.add_argument("--out", type=Path, default=Path("out/real"))
    parser.add_argument("--draw", type=Path, help="draw the figure into this file, and run nothing")
    args = parser.parse_args()
    if args.draw:
        return draw(args.out, args.draw)
    if not args.data:
        parser.error("--data FOLDER is needed: train.jsonl and test.jsonl with the columns question and answer")
    deadline = time.monotonic() + args.timeout
    waiting = [(arm, seed) for seed in args.seeds for arm in args.arms]
    places = [gpu for _ in range(args.side_by_side) for gpu in args.gpus]
    while waiting:
        batch, waiting = waiting[: len(places)], waiting[len(places) :]
        runs = [Run(args, arm, seed, gpu) for (arm, seed), gpu in zip(batch, places, strict=False)]
        watched(runs, deadline)
        print(HEAD)
        for run in runs:
            result = run.result(alone=[one.gpu for one in runs].count(run.gpu) == 1)
            run.folder.with_name(run.folder.name + ".json").write_text(json.dumps(result))
            print(line(result), flush=True)
    return None


if __name__ == "__main__":
    main()
