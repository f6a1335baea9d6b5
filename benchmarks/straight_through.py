"""Which operands the straight-through backward pass should have: learning curves and cost of `QATAligned(backward=…)`.

    python benchmarks/straight_through.py --out runs/straight_through --jobs 2
    python benchmarks/straight_through.py --out runs/straight_through --report
    python benchmarks/straight_through.py --cost          # of one iteration's tokens, on the CPU
    python benchmarks/straight_through.py --cost --device cuda

The quickstart under an aligned learner, formats × backward passes × seeds, one thread each. What a run found is one
JSON file under `--out`; those that are there are not made again, and those not finished after `--limit` seconds
are given up. Each run is evaluated at its end as the sampler computes and with the master weights, four completions of
each held-out problem. Differences are taken seed by seed. `--cost` measures forward and backward passes by themselves:
on the CPU in seconds of this process, which other processes do not lengthen as they do wall time; on a GPU over layers
of the 7B shape.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from itertools import product
from pathlib import Path
from typing import Any

import torch

from lit_qrl.cli.main import main
from lit_qrl.policy import CausalPolicy
from lit_qrl.precision import QATAligned
from lit_qrl.report.run import Run

ROOT = Path(__file__).resolve().parents[1]
FORMATS = ("int4_group", "nvfp4")
BACKWARD = ("high_precision", "dequantized")
EVALUATED = {"sampler": "rollout", "master": "learner"}
SHOWN = ("sampler", "master", "reward", "curve", "seconds")
COSTED = (*FORMATS, "fp8_row", "fp8_block", "int8_channel")


def train(job: tuple[Path, str, str, int, int]) -> str:
    """Make one run and its two evaluations, and return a line on what it found or why it ended."""
    out, format, backward, seed, iterations = job
    name = f"{format}-{backward}-{seed}"
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as folder:
        try:
            found = {"format": format, "backward": backward, "seed": seed, "iterations": iterations}
            found |= measured(Path(folder), format, backward, seed, iterations)
        except (Exception, SystemExit):
            log = Path(folder) / "log.txt"
            (out / f"{name}.log").write_text((log.read_text()[-4000:] if log.exists() else "") + traceback.format_exc())
            return f"{name} ended early, see {name}.log"
    partial = out / f"{name}.partial"
    partial.write_text(json.dumps(found))
    partial.rename(out / f"{name}.json")
    return f"{name} {found['sampler']:.3f} {found['master']:.3f} {found['seconds']:.0f} s"


def measured(folder: Path, format: str, backward: str, seed: int, iterations: int) -> dict[str, Any]:
    """Return the accuracies of a run, its rewards and the processor time of its training."""
    files = ("configs/quickstart.yaml", f"configs/precision/qat_{format}.yaml")
    common = [word for file in files for word in ("--config", file)]
    common += ["--trainer.plugins.backward", backward, "--seed_everything", str(seed)]
    common += ["--model.policy.model", "models/tiny-countdown"]
    common += ["--trainer.max_epochs", str(iterations), "--trainer.check_val_every_n_epoch", "20"]
    common += ["--trainer.enable_progress_bar", "false"]
    before = time.process_time()
    call(folder, "fit", *common, "--trainer.default_root_dir", str(folder / "run"))
    found: dict[str, Any] = {"seconds": time.process_time() - before}
    for name, choice in EVALUATED.items():
        at = folder / choice
        settings = ("--publisher.evaluation_format", choice, "--data.evaluation_samples", "4")
        checkpoint = ("--ckpt_path", str(folder / "run" / "checkpoints" / "last.ckpt"))
        call(folder, "test", *common, *settings, *checkpoint, "--trainer.default_root_dir", str(at))
        runs = (Run(path.parent) for path in at.rglob("metrics.csv"))
        found[name] = next(value for run in runs if (value := run.series("test/accuracy").last) is not None)
    run = Run(folder / "run")
    found["rewards"], found["accuracies"] = run.series("reward/mean").values, run.series("val/accuracy").values
    return found | {"reward": statistics.fmean(found["rewards"][-10:]), "curve": statistics.fmean(found["rewards"])}


def call(folder: Path, *arguments: str) -> None:
    """Run `lit-qrl` in this process, its output in `log.txt`."""
    with (folder / "log.txt").open("a") as log, redirect_stdout(log), redirect_stderr(log):
        main(arguments)


def start() -> None:
    """Settle what all runs of a process share: one thread, no GPU, and where configurations and models lie."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    os.chdir(ROOT)


def run_all(out: Path, seeds: int, iterations: int, jobs: int, limit: float) -> None:
    """Make what is missing, several runs at a time, until `limit` seconds have passed."""
    out.mkdir(parents=True, exist_ok=True)
    wanted = ((out, *one, iterations) for one in product(FORMATS, BACKWARD, range(seeds)))
    missing = [job for job in wanted if not (out / f"{job[1]}-{job[2]}-{job[3]}.json").exists()]
    end = time.monotonic() + limit
    # processes that start anew: threads and caches of one run are not inherited
    with multiprocessing.get_context("spawn").Pool(max(1, min(jobs, len(missing))), start, maxtasksperchild=1) as pool:
        lines = pool.imap_unordered(train, missing)
        for _ in missing:
            try:
                print(lines.next(max(0.0, end - time.monotonic())), flush=True)
            except multiprocessing.TimeoutError:
                print(f"{limit:.0f} s have passed; the same command makes what is missing.", flush=True)
                return


def cost(rounds: int = 8) -> str:
    """Return a table of the seconds of a forward and backward pass, and of how far the two gradients are apart.

    The batch has as many tokens as an iteration; its loss is of log-probs times advantages of random sign.
    """
    start()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(12, (256, 26), generator=generator)
    advantages = 2.0 * torch.randint(2, (256, 1), generator=generator) - 1.0
    headings = (f"`{backward}`, s" for backward in BACKWARD)
    lines = [f"| format | {' | '.join(headings)} | cosine of the gradients |", "|---|---|---|---|"]
    for format in COSTED:
        policies = {}
        for backward in BACKWARD:
            policies[backward] = CausalPolicy("models/tiny-countdown")
            policies[backward].configure()
            QATAligned(format, backward=backward).convert_module(policies[backward])
        seconds: dict[str, list[float]] = {backward: [] for backward in BACKWARD}
        for index in range(rounds):  # in turns, so that what else happens on the machine happens to both
            for backward in BACKWARD[:: 1 if index % 2 else -1]:
                before = time.process_time()
                logits = policies[backward].network(input_ids=tokens[:, :-1], use_cache=False).logits
                logprobs = logits.log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)
                (advantages * logprobs).mean().backward()
                seconds[backward].append(time.process_time() - before)
        cells = (mean_and_error(seconds[backward][2:]) for backward in BACKWARD)
        first, second = (torch.cat([p.grad.flatten() for p in one.parameters()]) for one in policies.values())
        cosine = torch.cosine_similarity(first.double(), second.double(), dim=0)
        lines.append(f"| `{format}` | {' | '.join(cells)} | {cosine:.4f} |")
    return "\n".join(lines)


def gpu_cost(layers: int = 4) -> str:
    """Return a table of the milliseconds of a forward and backward pass through layers of the 7B shape on a GPU."""
    from precision import Stack, free, seconds

    lines = [f"| format | {' | '.join(f'`{b}`, ms' for b in BACKWARD)} | GiB added, each |", "|---|---|---|---|"]
    for format in COSTED:
        times, peaks = [], []
        for backward in BACKWARD:
            free()
            stack = Stack("7b", layers, 4, 2048)
            QATAligned(format, backward=backward).convert_module(stack.model)
            times.append(f"{1e3 * seconds(stack.step_with_new_weights):.1f}")
            peaks.append(f"{stack.peak():.2f}")
            del stack
        lines.append(f"| `{format}` | {' | '.join(times)} | {', '.join(peaks)} |")
    return "\n".join(lines)


def mean_and_error(values: Sequence[float], digits: int = 3) -> str:
    """Return the mean, and of several values its standard error.

    >>> mean_and_error([1.0, 2.0, 3.0], 2)
    '2.00 ± 0.58'
    """
    mean = f"{statistics.fmean(values):.{digits}f}" if values else "–"
    return f"{mean} ± {statistics.stdev(values) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else mean


def report(out: Path) -> str:
    """Return the table of the runs under `out`, of seeds that both backward passes have."""
    runs = {(one["format"], one["seed"], one["backward"]): one for one in map(read, sorted(out.glob("*.json")))}
    lines = [
        "| format | backward | seeds | sampler's accuracy | master weights' | reward, last 10 | all | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for format in FORMATS:
        both = [s for f, s, b in runs if f == format and b == BACKWARD[0] and (f, s, BACKWARD[1]) in runs]
        if not both:
            continue
        columns = {b: [[runs[format, s, b][key] for s in both] for key in SHOWN] for b in BACKWARD}
        paired = [[b - a for a, b in zip(*pair, strict=True)] for pair in zip(*columns.values(), strict=True)]
        for name, found in ((f"`{BACKWARD[0]}`", columns[BACKWARD[0]]), (f"`{BACKWARD[1]}`", columns[BACKWARD[1]]),
                            ("difference", paired)):  # fmt: skip
            cells = [
                mean_and_error(values, 3 if key != "seconds" else 1) for key, values in zip(SHOWN, found, strict=True)
            ]
            lines.append(f"| `{format}` | {name} | {len(both)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def read(file: Path) -> dict[str, Any]:
    """Return what a run found."""
    return json.loads(file.read_text())


def command_line() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "runs" / "straight_through", help="folder of what runs found"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--limit", type=float, default=1e6, help="seconds after which unfinished runs are given up")
    parser.add_argument("--report", action="store_true", help="print the table of what there is, run nothing")
    parser.add_argument("--cost", action="store_true", help="measure both backward passes, run nothing")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where `--cost` measures")
    asked = parser.parse_args()
    if asked.cost:
        print(cost() if asked.device == "cpu" else gpu_cost())
        return
    out = asked.out.resolve()
    if not asked.report:
        run_all(out, asked.seeds, asked.iterations, asked.jobs, asked.limit)
    print(report(out))


if __name__ == "__main__":
    command_line()
