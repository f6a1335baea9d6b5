"""What the runs say of the claims in README.md: seed by seed, with an interval, and Holm's rule within each letter.

    python examples/real_study/claims.py docs/figures/evidence/real/curves.csv
    python examples/real_study/claims.py runs/real_study curves.csv --distilled runs/distilled --curves all.csv

Prints a table. Each path is a folder of runs or the rows that `--curves` wrote of one; the first that has an arm and a
seed counts. A claim that no two seeds have the runs for is "not run". `--curves` writes every row of the runs that have
finished, and as row `learner` what their last weights reach unquantized.
"""

import argparse
import csv
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, linear_regression

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "evidence_study")]

from paired import holm, paired_test  # noqa: E402  beside this folder
from study_report import T_QUANTILES, detectable, standard_error  # noqa: E402

from lit_qrl.report.run import Run  # noqa: E402

ALPHA = 0.05
COLUMNS = ("reward/mean", "rollout/stopped", "mismatch/kl_k3", "mismatch/abs_log_ratio", "mismatch/ess_ratio")
COLUMNS += ("mismatch/weight_cv", "correction/alpha", "val/accuracy", "val/greedy_pass@1", "val/stopped")
COLUMNS += ("update/entropy", "update/reference_kl", "guard/reverted", "publish/merge_lost")
"""What is kept of a row."""
LEARNER = "learner"


@dataclass
class Curves:
    """A run's rows in order, and that of its last weights, evaluated unquantized."""

    rows: list[dict[str, float]] = field(default_factory=list)
    learner: dict[str, float] = field(default_factory=dict)

    def of(self, name: str) -> list[float]:
        """Return the values of a column."""
        return [row[name] for row in self.rows if name in row]


Known = dict[tuple[str, int], Curves]
"""Runs by arm and seed."""
Read = Callable[[Curves], float | None]
"""What is taken of a run; None where it is not there."""


def of_folder(folder: Path) -> Known:
    """Return the finished runs under a folder."""
    found: Known = {}
    for metrics in sorted(folder.glob("*/[0-9]*/metrics.csv")):
        run = Run(metrics.parent)
        after = sorted(run.folder.glob("validate/*/metrics.csv"))[-1:]
        if run.status == "finished":
            learner = kept(next(iter(Run(after[0].parent).rows), {})) if after else {}
            found[run.folder.parent.name, int(run.folder.name)] = Curves([kept(row) for row in run.rows], learner)
    return found


def kept(row: dict[str, float]) -> dict[str, float]:
    """Return the columns of a row that are kept."""
    return {name: float(f"{row[name]:.6g}") for name in COLUMNS if name in row}


def of_table(path: Path) -> Known:
    """Return the runs that `write_curves` wrote."""
    found: Known = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            run = found.setdefault((row["arm"], int(row["seed"])), Curves())
            values = {name: float(row[name]) for name in COLUMNS if row[name]}
            if row["row"] == LEARNER:
                run.learner = values
            else:
                run.rows.append(values)
    return found


def known(paths: Iterable[Path]) -> Known:
    """Return the runs of all paths; the first path that has an arm and a seed counts."""
    found: Known = {}
    for path in paths:
        found = (of_folder(path) if path.is_dir() else of_table(path)) | found
    return found


def sampler(run: Curves) -> float | None:
    """Return the sampler's accuracy at the end."""
    return run.of("val/accuracy")[-1] if run.of("val/accuracy") else None


def learner(run: Curves) -> float | None:
    """Return the accuracy of the last weights, unquantized."""
    return run.learner.get("val/accuracy")


def gained(run: Curves) -> float | None:
    """Return what the sampler's accuracy has gained over that before training."""
    values = run.of("val/accuracy")
    return values[-1] - values[0] if len(values) > 1 else None


def entropy(run: Curves) -> float | None:
    """Return the mean entropy of the first 20 iterations."""
    values = run.of("update/entropy")
    return fmean(values[:20]) if values else None


def log_gap(run: Curves) -> float | None:
    """Return the log of the mean |log-ratio| over all iterations."""
    values = run.of("mismatch/abs_log_ratio")
    return math.log(fmean(values)) if any(values) else None


def drift(run: Curves) -> float | None:
    """Return the slope of log KL from iteration 10 on, per iteration."""
    values = run.of("mismatch/kl_k3")[9:]
    return linear_regression(range(len(values)), [math.log(one) for one in values]).slope if len(values) > 1 else None


def falling(run: Curves) -> float | None:
    """Return the log of the KL to the teacher, last five iterations over first five."""
    values = run.of("update/reference_kl")
    return math.log(fmean(values[-5:]) / fmean(values[:5])) if len(values) > 9 else None


@dataclass(frozen=True)
class Claim:
    """One line of the registration.

    Args:
        name: its letter and number.
        arm: whose figure is taken.
        against: what is subtracted, seed by seed; None subtracts nothing.
        expected: 1 where the figure is to be above `margin`, -1 where below.
        read: the figure.
        margin: 0, or the loss that is allowed.
        apart: take `arm` from the runs that began at the trained weights.
    """

    name: str
    arm: str
    against: str | None
    expected: int = 1
    read: Read = sampler
    margin: float = 0.0
    apart: bool = False


FORMATS = ("int4", "nvfp4")
BF16, INT4, FP8 = "grpo+none+bf16", "grpo+none+int4_group", "grpo+none+fp8_tensor"
NVFP4_LORA, BF16_LORA = "grpo+none+lora_nvfp4", "grpo+none+lora_bf16"
MIS, TIS = "grpo+sequence_mis+int4_group", "grpo+sequence_tis+int4_group"
CLAIMS = (
    Claim("A1", FP8, BF16, -1),
    Claim("A2", "grpo+ais+fp8_tensor", FP8),
    Claim("A2", "grpo+ais+fp8_tensor", "grpo+tis_5+fp8_tensor"),
    Claim("A3", FP8, None, read=drift),
    Claim("A4", INT4, BF16, -1),
    Claim("A4", TIS, INT4),
    Claim("Q1", "grpo+none+aligned_int4", INT4),
    Claim("Q2", "tbpo+none+aligned_int4", "grpo+none+aligned_int4"),
    Claim("Q2", "tbpo+none+int4_group", INT4),
    Claim("E1", NVFP4_LORA, BF16_LORA, margin=-0.02),
    Claim("E2", f"{NVFP4_LORA}+aqn_wide", NVFP4_LORA),
    Claim("E3", NVFP4_LORA, BF16_LORA, read=entropy),
    Claim("J1", "grpo+none+fp8_block", BF16, -1),
    Claim("J2", "grpo+none+unified_fp8", BF16, margin=-0.02),
    Claim("S1", MIS, INT4),
    Claim("S1", MIS, TIS),
    *(Claim(f"D{2 - (one == 'int4')}", f"distillation+none+aligned_{one}", None, read=gained) for one in FORMATS),
    *(Claim("D3", f"distillation+none+aligned_{one}", None, -1, falling) for one in FORMATS),
    *(Claim("D4", f"grpo+none+aligned_{one}", f"distillation+none+aligned_{one}") for one in FORMATS),
    *(Claim("D5", f"distillation+none+aligned_{one}", f"grpo+none+aligned_{one}", apart=True) for one in FORMATS),
    *(Claim("D6", f"distillation+none+aligned_{one}", None, read=gained, apart=True) for one in FORMATS),
    Claim("U1", "adaptive+tis_2+int4_group", "grpo+tis_2+int4_group"),
    Claim("M1", f"{INT4}+revert", INT4, read=learner),
    Claim("L1", f"{BF16_LORA}+beside", BF16_LORA, margin=-0.02),
    Claim("L2", f"{BF16_LORA}+beside", BF16_LORA, -1, log_gap),
    Claim("X1", "grpo+none+mxfp8", BF16, margin=-0.02),
)


def figures(runs: Known, arm: str, read: Read) -> dict[int, float]:
    """Return the figure of an arm's runs by seed."""
    found = {seed: read(run) for (name, seed), run in sorted(runs.items()) if name == arm}
    return {seed: value for seed, value in found.items() if value is not None}


def differences(claim: Claim, runs: Known, distilled: Known) -> list[float]:
    """Return the claim's figure seed by seed, over its margin."""
    found = figures(distilled if claim.apart else runs, claim.arm, claim.read)
    if claim.against is not None:
        theirs = figures(runs, claim.against, claim.read)
        found = {seed: value - theirs[seed] for seed, value in found.items() if seed in theirs}
    return [value - claim.margin for value in found.values()]


def table(runs: Known, distilled: Known) -> list[str]:
    """Return the lines of the table."""
    gaps = [differences(claim, runs, distilled) for claim in CLAIMS]
    adjusted: dict[str, float] = {}
    for letter in dict.fromkeys(claim.name[0] for claim in CLAIMS):
        mine = [at for at, claim in enumerate(CLAIMS) if claim.name[0] == letter and len(gaps[at]) > 1]
        adjusted |= holm({str(at): paired_test(gaps[at]) for at in mine})
    lines = ["| claim | arm | against | seeds | found | 95 % | p, Holm | detectable | it is |", "|---" * 9 + "|"]
    for at, (claim, gap) in enumerate(zip(CLAIMS, gaps, strict=True)):
        row = [claim.name, f"`{claim.arm}`", f"`{claim.against}`" if claim.against else "0", str(len(gap))]
        if len(gap) < 2:
            lines.append("| " + " | ".join([*row, *(["–"] * 4), "not run"]) + " |")
            continue
        mean, half, p = fmean(gap), T_QUANTILES[len(gap) - 2][0] * standard_error(gap), adjusted[str(at)]
        verdict = "not decided" if p >= ALPHA else "confirmed" if mean * claim.expected > 0 else "refuted"
        low, high = (mean + claim.margin + side * half for side in (-1, 1))
        row += [f"{mean + claim.margin:+.3f}", f"{low:+.3f} to {high:+.3f}", f"{p:.2g}", f"{detectable(gap):.3f}"]
        lines.append("| " + " | ".join([*row, verdict]) + " |")
    return lines


def write_curves(runs: Known, path: Path) -> None:
    """Write every row of the runs."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["arm", "seed", "row", *COLUMNS])
        for (arm, seed), run in sorted(runs.items()):
            for number, row in [*enumerate(run.rows), *([(LEARNER, run.learner)] if run.learner else [])]:
                writer.writerow([arm, seed, number, *(f"{row[name]:.6g}" if name in row else "" for name in COLUMNS)])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", type=Path, nargs="+", help="folders of runs, or rows that --curves wrote")
    parser.add_argument("--distilled", type=Path, nargs="*", default=[], help="the same, of runs from trained weights")
    parser.add_argument("--curves", type=Path, help="where to write the rows of all runs")
    asked = parser.parse_args()
    runs = known(asked.paths)
    if asked.curves:
        write_curves(runs, asked.curves)
    print("\n".join(table(runs, known(asked.distilled))))


if __name__ == "__main__":
    main()
