"""How far a learner is from its vLLM sampler on a real model, with and without the sampler's kernels: one run an arm.

    python benchmarks/on_policy.py --model FOLDER --data FOLDER
    python benchmarks/on_policy.py --arms bf16 fp8_row/aligned --iterations 100 --set --data.max_completion_tokens 400
    python benchmarks/on_policy.py --out docs/figures/on_policy/long --draw docs/figures/on_policy.png

Each run is `lit-qrl fit --config configs/real/gsm8k.yaml --config configs/engine/vllm.yaml` in a process of its own, 16
prompts × 8 completions of at most 300 tokens. An arm is a format, then what computes the learner: nothing (bf16),
`aligned` (`QATAligned`), `unified` (`UnifiedFP8`) or `lora` (an adapter over such a base); then `own` where it keeps
kernels of its own (`same_kernels: false`), or `exact` (`batch_invariant: true`). The table has means over iterations,
and medians of the seconds from the third on; `on_policy.csv` has every iteration, and the figure is of that. `--model`
and `--data` as of `real_model.py`.
"""

import argparse
import csv
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEARNERS = {"": "rollout_{}", "aligned": "qat_{}", "unified": "unified_fp8", "lora": "{}_lora"}
ENGINES = {"own": ("same_kernels", "false"), "exact": ("batch_invariant", "true")}
ARMS = {
    "bf16": "bf16 on both sides",
    "fp8_row": "FP8 sampler, bf16 learner",
    "fp8_row/aligned/own": "QATAligned(fp8_row), kernels of its own",
    "fp8_block/unified/own": "UnifiedFP8, kernels of its own",
    "fp8_block/unified": "UnifiedFP8",
    "fp8_row/aligned": "QATAligned(fp8_row)",
    "fp8_block/aligned": "QATAligned(fp8_block)",
    "int4_group/aligned": "QATAligned(int4_group)",
    "bf16/exact": "bf16, to the last bit",
    "fp8_row/aligned/exact": "QATAligned(fp8_row), to the last bit",
    "fp8_block/aligned/exact": "QATAligned(fp8_block), to the last bit",
    "fp8_block/unified/exact": "UnifiedFP8, to the last bit",
    "int4_group/aligned/exact": "QATAligned(int4_group), to the last bit",
    "int4_group/lora/exact": "LoRA over int4_group, to the last bit",
    "nvfp4/lora/exact": "LoRA over nvfp4, to the last bit",
}
SHOWN = {
    "KL": "mismatch/kl_k3",
    "|log-ratio|": "mismatch/abs_log_ratio",
    "ESS": "mismatch/ess_ratio",
    "largest ratio": "mismatch/ratio_max",
    "iteration, s": "time/iteration",
    "rollout, s": "time/rollout",
    "update, s": "time/update",
}
TABLE = "on_policy.csv"


def command(args: argparse.Namespace, arm: str, run: Path) -> list[str]:
    """Return the command line of an arm."""
    format, *rest = arm.split("/")
    learner = next((part for part in rest if part in LEARNERS), "")
    config = ROOT / "configs" / "precision" / f"{LEARNERS[learner].format(format)}.yaml"
    words = [sys.executable, "-m", "lit_qrl.cli", "fit"]
    for file in (ROOT / "configs/real/gsm8k.yaml", ROOT / "configs/engine/vllm.yaml", config):
        words += ["--config", str(file)]
    words += ["--model.policy.model", args.model, "--trainer.default_root_dir", str(run)]
    if args.data is not None:
        for key, file in (("path", "train"), ("evaluation_path", "test")):
            words += [f"--data.task.{key}", str(args.data / f"{file}.jsonl")]
        words += ["--data.task.subset", "null"]
    words += ["--trainer.max_epochs", str(args.iterations), "--trainer.check_val_every_n_epoch", "1000"]
    words += ["--data.prompts_per_iteration", "16", "--data.max_completion_tokens", "300"]
    words += ["--data.evaluation_limit", "8", "--report.every_n_iterations", "0"]
    words += ["--data.engine.init_args.gpu_memory_utilization", "0.2"]
    for name, value in (ENGINES[part] for part in rest if part in ENGINES):
        words += [f"--data.engine.init_args.{name}", value]
    return words + args.set


def rows_of(run: Path) -> list[dict[str, float]]:
    """Return what each iteration of a run measured."""
    with (run / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get(SHOWN["KL"])]
    return [{name: float(row[key]) for name, key in SHOWN.items()} for row in rows]


def write(out: Path) -> dict[str, list[dict[str, float]]]:
    """Write every iteration of all finished arms to the CSV, and return them."""
    found = {arm: rows_of(run) for arm in ARMS if (run := out / arm.replace("/", "-")).is_dir()}
    with (out / TABLE).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["arm", "iteration", *SHOWN])
        for arm, rows in found.items():
            writer.writerows([arm, i, *(f"{value:.6g}" for value in row.values())] for i, row in enumerate(rows, 1))
    return found


def show(found: dict[str, list[dict[str, float]]]) -> None:
    """Print the table."""
    print(" | ".join(("arm", "iterations", *SHOWN)))
    for arm, rows in found.items():
        measured = [
            statistics.median([row[name] for row in rows[2:]] or [0.0])
            if name.endswith(" s")
            else statistics.fmean(row[name] for row in rows)
            for name in SHOWN
        ]
        print(" | ".join((arm, str(len(rows)), *(f"{value:.3g}" for value in measured))))


def draw(out: Path, target: Path) -> None:
    """Draw the KL of every iteration of the CSV in `out`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with (out / TABLE).open() as file:
        rows = list(csv.DictReader(file))
    figure, axis = plt.subplots(figsize=(7.2, 3.4), layout="constrained")
    for number, arm in enumerate(one for one in ARMS if any(row["arm"] == one for row in rows)):
        kl = [float(row["KL"]) for row in rows if row["arm"] == arm]
        axis.semilogy(range(1, len(kl) + 1), kl, "o", markersize=3, color=f"C{number}", label=ARMS[arm])
    axis.set_xlabel("iteration")
    axis.set_ylabel("KL(sampler ‖ learner), nats a token")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", alpha=0.3)
    figure.legend(frameon=False, loc="outside right center", fontsize="small")
    figure.savefig(target, dpi=150)


def main() -> None:
    """Run the arms and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen2.5-Coder-0.5B-Instruct", help="a folder, or a name on the hub")
    parser.add_argument("--data", type=Path, help="folder of train.jsonl and test.jsonl")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--side_by_side", type=int, default=1, help="runs that share the GPU")
    parser.add_argument("--out", type=Path, default=Path("out/on_policy"))
    parser.add_argument("--draw", type=Path, help="draw the figure into this file, and run nothing")
    parser.add_argument("--set", nargs=argparse.REMAINDER, default=[], help="last: further words for `lit-qrl fit`")
    args = parser.parse_args()
    if args.draw:
        draw(args.out, args.draw)
        return
    args.out.mkdir(parents=True, exist_ok=True)

    def run(arm: str) -> None:
        folder = args.out / arm.replace("/", "-")
        with folder.with_suffix(".log").open("w") as log:
            status = subprocess.run(
                command(args, arm, folder), cwd=ROOT, stdout=log, stderr=log, check=False
            ).returncode
        print(f"{arm}: status {status}", flush=True)

    with ThreadPoolExecutor(args.side_by_side) as pool:
        list(pool.map(run, args.arms))
    show(write(args.out))


if __name__ == "__main__":
    main()
