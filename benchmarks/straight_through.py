"""Which operands the straight-through backward pass should have: learning curves and cost of `QATAligned(backward=…)`.

    python benchmarks/straight_through.py --out runs/straight_through --jobs 2
    python benchmarks/straight_through.py --out runs/straight_through --report
    python benchmarks/straight_through.py --cost

The quickstart under an aligned learner, formats × backward passes × seeds, one thread each; runs that are finished are
left alone. Each run is evaluated at its end as the sampler computes and with the master weights, four completions of
each held-out problem. Differences are taken seed by seed. `--cost` measures forward and backward passes by themselves,
in seconds of this process, which other processes do not lengthen as they do wall time.
"""

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from itertools import product, repeat
from pathlib import Path

import torch

from lit_qrl.cli.main import main
from lit_qrl.policy import CausalPolicy
from lit_qrl.precision import QATAligned
from lit_qrl.report.run import Run

ROOT = Path(__file__).resolve().parents[1]
FORMATS = ("int4_group", "nvfp4")
BACKWARD = ("high_precision", "dequantized")
EVALUATED = {"sampler": "rollout", "master weights": "learner"}
COSTED = (*FORMATS, "fp8_row", "fp8_block", "int8_channel")


def train(out: Path, format: str, backward: str, seed: int, iterations: int) -> None:
    """Make one run and its two evaluations, where they are missing."""
    folder = folder_of(out, format, backward, seed)
    files = ("configs/quickstart.yaml", f"configs/precision/qat_{format}.yaml")
    common = [word for file in files for word in ("--config", file)]
    common += ["--trainer.plugins.backward", backward, "--seed_everything", str(seed)]
    common += ["--trainer.max_epochs", str(iterations), "--trainer.check_val_every_n_epoch", "20"]
    common += ["--trainer.enable_progress_bar", "false"]
    if Run(folder).status != "finished":
        call(folder, "fit", *common, "--trainer.default_root_dir", str(folder))
    for choice in EVALUATED.values():
        at = folder / choice
        if accuracy(at) is None:
            settings = ("--publisher.evaluation_format", choice, "--data.evaluation_samples", "4")
            checkpoint = ("--ckpt_path", str(folder / "checkpoints" / "last.ckpt"))
            call(at, "test", *common, *settings, *checkpoint, "--trainer.default_root_dir", str(at))
    found = (f"{name} {accuracy(folder / choice):.3f}" for name, choice in EVALUATED.items())
    print(format, backward, seed, *found, flush=True)


def call(folder: Path, *arguments: str) -> None:
    """Run `lit-qrl` in this process, its output in `log.txt`."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.txt").open("a") as log, redirect_stdout(log), redirect_stderr(log):
        main(arguments)


def start() -> None:
    """Settle what all runs of a process share: one thread, and where configurations and models lie."""
    torch.set_num_threads(1)
    os.chdir(ROOT)


def folder_of(out: Path, format: str, backward: str, seed: int) -> Path:
    """Return where a run lies."""
    return out / format / backward / str(seed)


def accuracy(folder: Path) -> float | None:
    """Return the accuracy of an evaluation, or None where there is none."""
    values = [run.series("test/accuracy").last for run in (Run(path.parent) for path in folder.rglob("metrics.csv"))]
    return next((value for value in values if value is not None), None)


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


def mean_and_error(values: Sequence[float], digits: int = 3) -> str:
    """Return the mean, and of several values its standard error.

    >>> mean_and_error([1.0, 2.0, 3.0], 2)
    '2.00 ± 0.58'
    """
    mean = f"{statistics.fmean(values):.{digits}f}" if values else "–"
    return f"{mean} ± {statistics.stdev(values) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else mean


def report(out: Path, seeds: int) -> str:
    """Return the table."""
    lines = [
        "| format | backward | seeds | sampler's accuracy | master weights' | reward, last 10 |",
        "|---|---|---|---|---|---|",
    ]
    for format in FORMATS:
        columns: dict[str, list[tuple[float, ...]]] = {}
        for backward in BACKWARD:
            rows = [values(Run(folder_of(out, format, backward, seed))) for seed in finished(out, format, seeds)]
            columns[backward] = list(zip(*rows, strict=True))
            cells = [mean_and_error(column) for column in columns[backward]]
            lines.append(f"| `{format}` | `{backward}` | {len(rows)} | {' | '.join(cells)} |")
        first, second = (columns[backward] for backward in BACKWARD)
        if not first:
            continue
        paired = [[b - a for a, b in zip(*pair, strict=True)] for pair in zip(first, second, strict=True)]
        cells = [mean_and_error(column) for column in paired]
        lines.append(f"| | difference | {len(paired[0])} | {' | '.join(cells)} |")
    return "\n".join(lines)


def finished(out: Path, format: str, seeds: int) -> list[int]:
    """Return the seeds of which the runs of all backward passes are evaluated."""
    runs = {seed: [folder_of(out, format, backward, seed) for backward in BACKWARD] for seed in range(seeds)}
    return [
        s
        for s, folders in runs.items()
        if all(accuracy(f / c) is not None for f in folders for c in EVALUATED.values())
    ]


def values(run: Run) -> list[float]:
    """Return both accuracies of a run and its reward at the end."""
    found = [accuracy(run.folder / choice) for choice in EVALUATED.values()]
    reward = statistics.fmean(run.series("reward/mean").values[-10:])
    return [*(value for value in found if value is not None), reward]


def command_line() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "straight_through", help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--report", action="store_true", help="print the table of what there is, run nothing")
    parser.add_argument("--cost", action="store_true", help="measure both backward passes, run nothing")
    asked = parser.parse_args()
    if asked.cost:
        print(cost())
        return
    out = asked.out.resolve()
    if not asked.report:
        seeds, formats, backward = zip(*product(range(asked.seeds), FORMATS, BACKWARD), strict=True)
        # processes that start anew: threads and caches of one run are not inherited
        with ProcessPoolExecutor(asked.jobs, multiprocessing.get_context("spawn"), start) as pool:
            list(pool.map(train, repeat(out), formats, backward, seeds, repeat(asked.iterations)))
    print(report(out, asked.seeds))


if __name__ == "__main__":
    command_line()
