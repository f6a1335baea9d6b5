"""Runs a command of the Trainer twice, side by side, and says whether both gave the same bits.

    python benchmarks/twice.py --out FOLDER -- --config configs/quickstart.yaml --trainer.deterministic true

Compared are the metrics of every step, times and rates apart, every sampled completion, and what the last checkpoint
holds of weights and optimizer. Ends with status 1 where anything differs, and names it.
"""

import argparse
import csv
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

UNEQUAL = ("time/", "tokens_per_second", "gigabytes_per_second", "memory", "seconds")
"""Parts of the names of metrics that are a clock's or a counter's of memory."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the two run folders go")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for both")
    parser.add_argument("--in-turn", action="store_true", help="one after the other")
    parser.add_argument("arguments", nargs="+", help="of `lit-qrl fit`")
    args = parser.parse_args()
    folders = [args.out / name for name in ("first", "second")]
    running = []
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "lit_qrl.cli", "fit", *args.arguments]
        command += ["--trainer.default_root_dir", str(folder / "run")]
        log = (folder / "log.txt").open("w")
        running.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT))
        if args.in_turn:
            running[-1].wait(args.timeout)
    codes = [one.wait(args.timeout) for one in running]
    if any(codes):
        print(f"TWICE the runs ended with {codes}")
        for folder in folders:
            print(*(folder / "log.txt").read_text(errors="replace").splitlines()[-15:], sep="\n")
        sys.exit(2)
    found = differences(*(folder / "run" for folder in folders))
    rows = len(list(csv.DictReader((folders[0] / "run" / "metrics.csv").open())))
    print(f"TWICE {'equal' if not found else 'different'}: {rows} rows of metrics", *found[:12], sep="\n  ")
    sys.exit(bool(found))


def differences(first: Path, second: Path) -> list[str]:
    """Return what differs between two run folders."""
    tables = [list(csv.DictReader((folder / "metrics.csv").open())) for folder in (first, second)]
    found = [] if len(tables[0]) == len(tables[1]) else [f"rows of metrics: {[len(table) for table in tables]}"]
    for a, b in zip(*tables, strict=False):
        found += [
            f"step {a.get('step')}: {name} {a.get(name)} {b.get(name)}"
            for name in sorted(a.keys() | b.keys())
            if a.get(name) != b.get(name) and not any(part in name for part in UNEQUAL)
        ]
    samples = [(folder / "samples.jsonl").read_text() for folder in (first, second)]
    if samples[0] != samples[1]:
        found.append("samples.jsonl")
    states = [dict(tensors(folder / "checkpoints" / "last.ckpt")) for folder in (first, second)]
    for name in states[0].keys() | states[1].keys():
        a, b = (state.get(name) for state in states)
        if a is None or b is None or a.shape != b.shape or not a.view_as(b).equal(b):
            found.append(f"checkpoint: {name}")
    return found


def tensors(checkpoint: Path) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a checkpoint, weights and optimizer, under their places in it."""
    import torch

    held = torch.load(checkpoint, map_location="cpu", weights_only=True)

    def walk(value: Any, place: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, torch.Tensor):
            yield place, value
        elif isinstance(value, dict):
            for key, one in value.items():
                yield from walk(one, f"{place}.{key}")
        elif isinstance(value, list | tuple):
            for i, one in enumerate(value):
                yield from walk(one, f"{place}.{i}")

    yield from walk({key: held[key] for key in ("state_dict", "optimizer_states")}, "")


if __name__ == "__main__":
    main()
