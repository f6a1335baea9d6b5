"""Whether a replay has the bits of its run on this machine: runs with weights in flight, and runs that follow them.

    python benchmarks/replays.py --shape 1.5b --engines transformers vllm --modes keep --device 1 --out replays

Each run is `lit-qrl fit` in a process of its own, its engine in another on `--device`; the first writes `flight.jsonl`,
the second follows it. A row says how many updates met the engine in the middle of a draw, how many iterations have the
same tokens, drawn by the same versions, and in which columns of `metrics.csv` beside times the two differ. `--tiny`
tries it on a CPU.
"""

import argparse
import csv
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from iteration import SHAPES, TIS, model_folder  # noqa: E402  beside this script

TIMES = ("time/", "publish/gigabytes_per_second", "rollout/tokens_per_second", "rollout/seconds_ahead", "memory/")


def main() -> None:
    """Make the runs, and print a row of each pair as it comes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1.5b")
    parser.add_argument("--engines", nargs="+", default=["transformers", "vllm"], choices=["transformers", "vllm"])
    parser.add_argument("--modes", nargs="+", default=["keep"], choices=["keep", "recompute"])
    parser.add_argument("--format", default="fp8_row")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--completion", type=int, default=512)
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--replays", type=int, default=1, help="of each run; a second one is compared with the first")
    parser.add_argument("--deterministic", action="store_true", help="replays set trainer.deterministic")
    parser.add_argument("--device", default="1")
    parser.add_argument("--timeout", type=float, default=120, help="seconds of a run")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.tiny:
        args.shape, args.completion, args.prompts, args.device = "tiny", 24, 4, "cpu"
    print("| engine | mode | replay | seconds | updates in a draw | same rollouts | columns that differ |", flush=True)
    print("| --- | --- | --- | ---: | ---: | ---: | --- |", flush=True)
    for engine in args.engines:
        for mode in args.modes:
            former = None
            for number in range(args.replays + 1):
                folder = (args.out / f"{engine}-{mode}-{number}").resolve()
                began = time.monotonic()
                first = args.out.resolve() / f"{engine}-{mode}-0"
                if not fit(args, folder, engine, mode, first if number else None):
                    break
                if former is not None:
                    print(row(engine, mode, f"{number} of {former.name[-1]}", former, folder, began), flush=True)
                former = folder


def fit(args: argparse.Namespace, folder: Path, engine: str, mode: str, replay: Path | None) -> bool:
    """Make a run, and return whether it came to its end."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder.with_suffix(".yaml")
    config.write_text(json.dumps(configuration(args, folder, engine, mode, replay)))
    paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with folder.with_suffix(".log").open("w") as log:
        command = [sys.executable, "-m", "lit_qrl.cli", "fit", "--config", str(config)]
        try:
            options = {"stdout": log, "stderr": log, "cwd": ROOT, "env": environment, "timeout": args.timeout}
            done = subprocess.run(command, **options, check=False)
        except subprocess.TimeoutExpired:
            print(folder.name, "was cut", flush=True)
            return False
    if done.returncode:
        print(folder.name, folder.with_suffix(".log").read_text()[-600:], flush=True)
    return not done.returncode


def configuration(
    args: argparse.Namespace, folder: Path, engine: str, mode: str, replay: Path | None
) -> dict[str, Any]:
    """Return the YAML of a run; what it is made of is the same for all, as a replay demands."""
    model = model_folder(args.out.resolve() / "models", args.shape, None, drawn=True)
    data = args.out.resolve() / "rows.jsonl"
    draw, words = random.Random(0), SHAPES[args.shape]["vocab_size"]
    rows = (
        {"question": " ".join(f"w{draw.randrange(3, words)}" for _ in range(12)), "answer": "1"} for _ in range(256)
    )
    data.write_text("".join(json.dumps(one) + "\n" for one in rows))
    held: dict[str, Any] = {"class_path": "TransformersEngine", "init_args": {"max_batch": 8} if args.tiny else {}}
    if engine == "vllm":
        options = {"gpu_memory_utilization": 0.8, "quick_start": True, "max_num_seqs": 8 * args.prompts}
        held = {"class_path": "VLLMEngine", "init_args": options}
    device = args.device if args.device == "cpu" else int(args.device)
    task = {"path": str(data), "evaluation_size": 8, "chat": False, "rewards": [{"class_path": "even_words.EvenWords"}]}
    policy = {"model": str(model), "tokenizer": str(model / "tokenizer"), "dtype": "bf16", "random_weights": True}
    return {
        "seed_everything": 0,
        "model": {
            "policy": {"class_path": "CausalPolicy", "init_args": policy},
            "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-6}},
        },
        "data": {
            "task": {"class_path": "DatasetTask", "init_args": task},
            "engine": {"class_path": "RemoteEngine", "init_args": {"engine": held, "devices": [device]}},
            "schedule": "async",
            "max_staleness": 2,
            "in_flight_updates": mode,
            "replay": None if replay is None else str(replay),
            "prompts_per_iteration": args.prompts,
            "micro_batches": args.prompts // 4,
            "max_prompt_tokens": 32,
            "max_completion_tokens": args.completion,
        },
        "publisher": {"format": args.format},
        "checkpoint": {"every_n_iterations": 0},
        "trainer": {
            "default_root_dir": str(folder),
            "max_epochs": args.iterations,
            "limit_val_batches": 0,
            "devices": 1,
            "precision": "bf16-true",
            "deterministic": True if args.deterministic and replay is not None else None,
            "callbacks": [TIS],
            **({"accelerator": "cpu"} if args.tiny else {}),
        },
    }


def row(engine: str, mode: str, name: str, first: Path, again: Path, began: float) -> str:
    """Return the table's row of two runs."""
    ours, theirs = (lines(folder / "flight.jsonl") for folder in (again, first))
    middle = sum(bool(steps) for one in theirs for _, steps in one.get("publish", []))
    same = sum(one == other for one, other in zip(ours, theirs, strict=False))
    differing = sorted(
        {
            key
            for mine, other in zip(columns(again), columns(first), strict=False)
            for key in mine
            if not key.startswith(TIMES) and mine[key] != other.get(key)
        }
    )
    told = f"{len(differing)}: {', '.join(differing[:4])}" if differing else "none"
    seconds = time.monotonic() - began
    return f"| {engine} | {mode} | {name} | {seconds:.0f} | {middle} | {same} of {len(theirs)} | {told} |"


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the iterations of a record."""
    return [one for one in map(json.loads, path.read_text().splitlines()) if "iteration" in one]


def columns(folder: Path) -> list[dict[str, str]]:
    """Return the rows of a run's metrics."""
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    main()
