"""What the runs say of the claims in README.md: seed by seed, with an interval, and Holm's rule within each letter.

    python examples/real_study/claims.py runs/real_study --distilled runs/distilled --curves curves.csv

Prints a table. A claim that no two seeds have the runs for is "not run". `--curves` writes every row of the runs'
metrics, and as row `learner` what their last weights reach unquantized.
"""

import argparse
import csv
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, linear_regression

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "evidence_study")]

from paired import holm, paired_test  # noqa: E402  beside this folder
from study_report import T_QUANTILES, detectable, of_learner, standard_error  # noqa: E402

from lit_qrl.report.run import Run  # noqa: E402

Read = Callable[[Run], float | None]
"""What is taken of a run; None where it is not there."""
ALPHA = 0.05
COLUMNS = ("reward/mean", "rollout/stopped", "mismatch/kl_k3", "mismatch/abs_log_ratio", "mismatch/ess_ratio")
COLUMNS += ("mismatch/weight_cv", "correction/alpha", "val/accuracy", "val/greedy_pass@1", "val/stopped")
COLUMNS += ("update/entropy", "update/reference_kl", "guard/reverted", "publish/merge_lost")
"""What is kept of a row."""


def sampler(run: Run) -> float | None:
    """Return the sampler's accuracy at the end."""
    return run.accuracy.last


def gained(run: Run) -> float | None:
    """Return what the sampler's accuracy has gained over that before training."""
    values = run.accuracy.values
    return values[-1] - values[0] if len(values) > 1 else None


def entropy(run: Run) -> float | None:
    """Return the mean entropy of the first 20 iterations."""
    values = run.series("update/entropy").values
    return fmean(values[:20]) if values else None


def log_gap(run: Run) -> float | None:
    """Return the log of the mean |log-ratio| over all iterations."""
    found = run.series("mismatch/abs_log_ratio").mean
    return math.log(found) if found else None


def drift(run: Run) -> float | None:
    """Return the slope of log KL from iteration 10 on, per iteration."""
    values = run.series("mismatch/kl_k3").values[9:]
    return linear_regression(range(len(values)), [math.log(one) for one in values]).slope if len(values) > 1 else None


def falling(run: Run) -> float | None:
    """Return the log of the KL to the teacher, last five iterations over first five."""
    values = run.series("update/reference_kl").values
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
    Claim("M1", f"{INT4}+revert", INT4, read=of_learner),
    Claim("L1", f"{BF16_LORA}+beside", BF16_LORA, margin=-0.02),
    Claim("L2", f"{BF16_LORA}+beside", BF16_LORA, -1, log_gap),
    Claim("X1", "grpo+none+mxfp8", BF16, margin=-0.02),
)


def figures(folder: Path, arm: str, read: Read) -> dict[int, float]:
    """Return the figure of an arm's finished runs by seed."""
    runs = {int(one.name): Run(one) for one in (folder / arm).glob("[0-9]*") if (one / "metrics.csv").exists()}
    found = {seed: read(run) for seed, run in sorted(runs.items()) if run.status == "finished"}
    return {seed: value for seed, value in found.items() if value is not None}


def differences(claim: Claim, folder: Path, distilled: Path | None) -> list[float]:
    """Return the claim's figure seed by seed, over its margin."""
    ours = distilled if claim.apart else folder
    if ours is None:
        return []
    found = figures(ours, claim.arm, claim.read)
    if claim.against is not None:
        theirs = figures(folder, claim.against, claim.read)
        found = {seed: value - theirs[seed] for seed, value in found.items() if seed in theirs}
    return [value - claim.margin for value in found.values()]


def table(folder: Path, distilled: Path | None = None) -> list[str]:
    """Return the lines of the table."""
    gaps = [differences(claim, folder, distilled) for claim in CLAIMS]
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


def write_curves(folder: Path, path: Path) -> None:
    """Write the rows of every run under a folder, with six digits."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["arm", "seed", "row", *COLUMNS])
        for metrics in sorted(folder.glob("*/*/metrics.csv")):
            after = sorted(metrics.parent.glob("validate/*/metrics.csv"))[-1:]
            rows = [*enumerate(Run(metrics.parent).rows), *(("learner", Run(one.parent).rows[0]) for one in after)]
            for number, row in rows:
                kept = (row.get(name) for name in COLUMNS)
                told = ["" if value is None else f"{float(value):.6g}" for value in kept]
                writer.writerow([metrics.parent.parent.name, metrics.parent.name, number, *told])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the study's runs")
    parser.add_argument("--distilled", type=Path, help="folder of the runs that began at the trained weights")
    parser.add_argument("--curves", type=Path, help="where to write the rows of all runs")
    asked = parser.parse_args()
    if asked.curves:
        write_curves(asked.folder, asked.curves)
    print("\n".join(table(asked.folder, asked.distilled)))


if __name__ == "__main__":
    main()
