"""A long run that is killed again and again against one that is left alone: the same weights, bit for bit, and no leak.

    python benchmarks/endurance.py --iterations 2000 --kills 10 --out out/endurance

Both are the command that a user would type, in processes of their own. The victim gets SIGKILL at moments drawn by
`--seed`, in a phase drawn with them (generation, update, publish, checkpoint writing, any), and goes on with
`--ckpt_path last`. In which phase it died is read from its stack, which it writes to a file on SIGUSR1 just before.
Memory (`VmRSS`), file descriptors and threads are read from `/proc`, and `/dev/shm` is listed, by this process, from
outside; of each the slope over the life that ends by itself is printed. `--part` makes one of the two runs, or the
comparison alone.

    python benchmarks/endurance.py --small --iterations 2000 --kills 10 --every 50 --out out/endurance

draws 16 completions an iteration and evaluates nothing, for where the number of iterations is what counts.
"""

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

WANTED = ("generation", "update", "publish", "checkpoint writing", "any")
MARKS = (
    ("checkpoint writing", r"run/checkpoint_files\.py\", line \d+ in _write"),
    ("checkpoint staging", r"callbacks/checkpoint\.py\", line \d+ in _save"),
    ("publish", r"lit_qrl/publish/|callbacks/publisher\.py"),
    ("evaluation", r"loop/evaluation\.py"),
    ("generation", r"loop/generation\.py\", line \d+ in draw\b"),
    ("reward", r"data/module\.py\", line \d+ in reward"),
    ("score", r"loop/iteration\.py\", line \d+ in score|loop/correction\.py"),
    ("update", r"lightning/pytorch/loops/optimization/|lightning/pytorch/core/module\.py\", line \d+ in backward"),
)
"""Phases by what stands on the stack, the first that is found."""
SMALL = (
    *("--data.prompts_per_iteration", "4", "--data.group_size", "4", "--trainer.limit_val_batches", "0"),
    *("--model.evaluate_first", "false", "--trainer.enable_progress_bar", "false"),
)
"""Options of a small iteration."""
SAMPLED = ("rss_kib", "descriptors", "threads", "shm_files", "shm_kib")
"""What is read of a process from outside."""
WINDOW = 10
"""Iterations whose median is the memory at a place of the run."""
TOLERANCE = 0.02
POLL = 0.2
PROBE = "publish/probe_"
CHILD = """
import faulthandler, signal, sys
faulthandler.register(signal.SIGUSR1, open(sys.argv.pop(1), "ab", buffering=0), all_threads=True)
from lit_qrl.cli.main import main
main()
"""


def parse() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--every", type=int, default=20, help="iterations between checkpoints")
    parser.add_argument("--reference", type=int, default=100, help="iteration whose memory the end is compared with")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--small", action="store_true", help="16 completions an iteration, and no evaluation")
    parser.add_argument("--part", choices=("all", "unbroken", "killed", "compare"), default="all")
    parser.add_argument("--out", type=Path, required=True, help="a folder for both runs, their logs and the figures")
    parser.add_argument("options", nargs="*", help="further options of fit, after --")
    return parser.parse_args()


def main() -> None:
    """Run the parts and print what came out; status 1 where the runs differ or memory grew."""
    args = parse()
    args.options = [*(SMALL if args.small else ()), *args.options]
    args.out.mkdir(parents=True, exist_ok=True)
    if args.part in ("all", "unbroken"):
        note(args, "unbroken", run(args, "unbroken", 0))
    if args.part in ("all", "killed"):
        note(args, "killed", run(args, "killed", args.kills))
    if args.part in ("all", "compare"):
        found = compare(args.out / "unbroken", args.out / "killed")
        note(args, "compare", found)
        runs = [json.loads((args.out / f"{name}.json").read_text()) for name in ("unbroken", "killed")]
        grown = [name for name, one in zip(("unbroken", "killed"), runs, strict=True) if not one["memory"]["within"]]
        sys.exit(bool(found["differing"] or found["elsewhere"] or grown))


def note(args: argparse.Namespace, name: str, found: dict[str, Any]) -> None:
    """Print the figures of a part and keep them."""
    (args.out / f"{name}.json").write_text(json.dumps(found, indent=1))
    print(name, json.dumps(found, indent=1), flush=True)


# ---------------------------------------------------------------------------------------------------------------- runs


@dataclass
class Life:
    """One process of a run."""

    first: int
    seconds: float = 0.0
    last: int = 0
    killed_in: str | None = None
    samples: dict[int, list[int]] = field(default_factory=dict)
    """Largest of each of `SAMPLED` by iteration."""

    @property
    def memory(self) -> dict[int, int]:
        """Largest VmRSS by iteration, KiB."""
        return {iteration: values[0] for iteration, values in self.samples.items()}


def run(args: argparse.Namespace, name: str, kills: int) -> dict[str, Any]:
    """Return the figures of one run with that many kills."""
    draw = random.Random(args.seed)
    moments = sorted(draw.sample(range(args.every + 1, args.iterations - args.every), kills))
    wanted = [WANTED[index % len(WANTED)] for index in range(kills)]
    draw.shuffle(wanted)
    folder, began = args.out / name, time.monotonic()
    lives: list[Life] = []
    for number in range(kills + 1):
        moment = (max(moments[number], lives[-1].last + 1 if lives else 0), wanted[number]) if number < kills else None
        lives.append(live(args, folder, moment, number, draw))
        print(f"{name}: {describe(lives[-1])}", flush=True)
    end = lives[-1].memory
    return {
        "iterations": args.iterations,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "lives": [describe(one) for one in lives],
        "killed_in": [one.killed_in for one in lives if one.killed_in],
        "memory": memory(end, min(end) + args.reference if kills else args.reference),
        "per_1000_iterations": slopes(lives[-1].samples),
    }


def describe(life: Life) -> str:
    """Return a life in a line."""
    end = f"killed in {life.killed_in}" if life.killed_in else "ended by itself"
    return f"iterations {life.first} to {life.last} in {life.seconds:.0f} s, {end}"


def memory(seen: dict[int, int], reference: int) -> dict[str, Any]:
    """Return the memory of a process around an iteration and at its end, in MiB, and whether it stayed.

    Args:
        seen: VmRSS by iteration, KiB.
        reference: the iteration; half of a shorter life.
    """
    first, last = min(seen), max(seen)
    reference = min(reference, (first + last) // 2)
    ends = []
    for centre in (reference, last - WINDOW // 2):
        near = [value for iteration, value in seen.items() if abs(iteration - centre) <= WINDOW // 2]
        ends.append(statistics.median(near) / 1024 if near else float("nan"))
    ratio = ends[1] / ends[0]
    return {
        "at": reference,
        "then_mib": round(ends[0], 1),
        "end_mib": round(ends[1], 1),
        "ratio": round(ratio, 4),
        "within": ratio <= 1 + TOLERANCE,
    }


def slopes(samples: dict[int, list[int]]) -> dict[str, float]:
    """Return by how much what is sampled grows in 1,000 iterations: least squares over the second half of a life.

    Of its last iteration the report is made, which is left out.

    >>> slopes({iteration: [1000 + 2 * iteration, 9, 4, 0, 0] for iteration in range(1, 9)})["rss_kib"]
    2000.0
    """
    late = sorted(samples)[len(samples) // 2 : -1]
    if len(late) < 2:
        return {}
    columns = zip(*(samples[iteration] for iteration in late), strict=True)
    lines = [statistics.linear_regression(late, column).slope for column in columns]
    return {name: round(1000 * slope, 2) for name, slope in zip(SAMPLED, lines, strict=True)}


def live(
    args: argparse.Namespace, folder: Path, moment: tuple[int, str] | None, number: int, draw: random.Random
) -> Life:
    """Return the life of one process, which ends by itself, or by SIGKILL at an iteration in a phase."""
    stacks = args.out / f"{folder.name}.stack"
    command = [sys.executable, "-c", CHILD, str(stacks), "fit", "--config", args.config]
    command += ["--trainer.default_root_dir", str(folder), "--trainer.max_epochs", str(args.iterations)]
    command += ["--checkpoint.every_n_iterations", str(args.every), *args.options]
    command += ["--ckpt_path", "last"] if number else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path[1:])])}
    metrics, began = folder / "metrics.csv", time.monotonic()
    with (args.out / f"{folder.name}.log").open("a") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=environment)
    life = Life(first=reached(metrics))
    try:
        while process.poll() is None:
            iteration = reached(metrics)
            now = sampled(process.pid)
            life.samples[iteration] = list(map(max, life.samples.get(iteration, now), now))
            if moment is not None and iteration >= moment[0]:
                life.killed_in = kill(process, stacks, moment[1], draw)
                break
            time.sleep(POLL)
    finally:
        process.kill()
    process.wait()
    life.last, life.seconds = reached(metrics), time.monotonic() - began
    if moment is None and process.returncode:
        raise SystemExit(f"The run ended with status {process.returncode}: see {args.out / folder.name}.log.")
    if moment is not None and life.killed_in is None:
        raise SystemExit(f"The run ended before iteration {moment[0]}: see {args.out / folder.name}.log.")
    return life


def reached(metrics: Path) -> int:
    """Return how many iterations have written a row."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 16384))
            whole = file.read().rpartition(b"\n")[0].rpartition(b"\n")[2]
        return int(float(whole.split(b",")[0])) + 1
    except (OSError, ValueError):
        return 0


def sampled(process: int) -> list[int]:
    """Return `SAMPLED` of a process, zeros when it is gone; `/dev/shm` is the whole host's."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
        descriptors = len(os.listdir(f"/proc/{process}/fd"))
        shared = [entry.stat().st_blocks // 2 for entry in os.scandir("/dev/shm")]
    except OSError:
        return [0] * len(SAMPLED)
    found = {key: int(value) for key, value in re.findall(r"(VmRSS|Threads):\s+(\d+)", status)}
    return [found.get("VmRSS", 0), descriptors, found.get("Threads", 0), len(shared), sum(shared)]


def kill(process: subprocess.Popen, stacks: Path, wanted: str, draw: random.Random, patience: float = 300) -> str:
    """Kill a process when it is in a phase, or after `patience` seconds; return the phase it was in."""
    deadline = time.monotonic() + patience
    time.sleep(draw.uniform(0, 2))
    while True:
        time.sleep(draw.uniform(0, 0.02))
        stack = stack_of(process, stacks)
        phase = phase_of(stack)
        if process.poll() is not None or wanted in ("any", phase) or time.monotonic() > deadline:
            process.kill()
            return phase


def stack_of(process: subprocess.Popen, stacks: Path) -> str:
    """Return what the threads of a process are doing."""
    stacks.touch()
    os.truncate(stacks, 0)
    process.send_signal(signal.SIGUSR1)
    for _ in range(200):
        time.sleep(0.0005)
        text = stacks.read_text()
        if text and text == stacks.read_text() and "most recent call first" in text.rpartition("Current thread")[2]:
            return text
    return ""


def phase_of(stack: str) -> str:
    """Return the phase that the stacks of a process show.

    >>> phase_of('  File "/x/lit_qrl/loop/generation.py", line 41 in draw')
    'generation'
    """
    return next((name for name, mark in MARKS if re.search(mark, stack)), "other")


# ---------------------------------------------------------------------------------------------------------- comparison


def compare(one: Path, other: Path) -> dict[str, Any]:
    """Return what differs between the last checkpoints of two runs, bit for bit, and between their metrics.

    Weights and the optimizer's state must not; what else a checkpoint holds is listed.
    """
    import torch

    first, second = (
        leaves(torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)) for folder in (one, other)
    )
    differing = [key for key in first.keys() | second.keys() if not same(first.get(key), second.get(key))]
    learned = [key for key in differing if key.startswith(("state_dict", "optimizer_states"))]
    tensors = [key for key, value in first.items() if isinstance(value, torch.Tensor)]
    rows = [metric_rows(folder / "metrics.csv") for folder in (one, other)]
    return {
        "tensors": len(tensors),
        "numbers": sum(first[key].numel() for key in tensors),
        "differing": sorted(learned),
        "elsewhere": sorted(set(differing) - set(learned)),
        "rows": len(rows[0]),
        "rows_differing": sum(a != b for a, b in zip(*rows, strict=False)) + abs(len(rows[0]) - len(rows[1])),
    }


def leaves(value: Any, key: str = "") -> dict[str, Any]:
    """Return the leaves of a tree of dicts and lists by their path."""
    if isinstance(value, dict | list | tuple):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        return {path: leaf for name, part in parts for path, leaf in leaves(part, f"{key}.{name}".strip(".")).items()}
    return {key: value}


def same(one: Any, other: Any) -> bool:
    """Return whether two leaves are the same, tensors bit for bit."""
    import torch

    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and one.contiguous().numpy().tobytes() == other.contiguous().numpy().tobytes()
    return type(one) is type(other) and bool(one == other)


def metric_rows(file: Path) -> list[dict[str, str]]:
    """Return the rows of `metrics.csv` without what a clock or the probe wrote, which asks every new engine first."""
    import csv

    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    return [
        {key: value for key, value in row.items() if not (key.startswith(("time/", PROBE)) or "per_second" in key)}
        for row in rows
    ]


if __name__ == "__main__":
    main()
