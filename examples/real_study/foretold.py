"""Judges on the pretrained model what was fitted on small policies: which runs end below their bf16 sampler's?

    python examples/real_study/foretold.py

A run has lost where its learner ends `LOSS` or more below that of its seed's bf16 sampler. It is foretold by the mean
|log-ratio| of its first iteration, alone and with its correction (the model `AUDIT` of `examples/evidence_grid`).
Reads the curves of docs/figures/evidence/real and prints a table; runs whose learner is aligned, a LoRA or under TBPO
are left out, as those models do not know them.
"""

import csv
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples" / folder) for folder in ("evidence_grid", "evidence_study", "")] + [str(ROOT)]

from loss_models import AUDIT  # noqa: E402  beside this folder
from loss_odds import LOSS, audit_inputs  # noqa: E402
from odds import auroc, interval  # noqa: E402

CURVES = ROOT / "docs" / "figures" / "evidence" / "real"
BASE = "grpo+none+bf16"
SAMPLERS = ("fp8_tensor", "fp8_row", "fp8_block", "int4_group")
LEARNER = "learner"


def runs(file: Path) -> dict[tuple[str, int], dict[str, dict[str, str]]]:
    """Return the rows of a file of curves by arm and seed, and by number."""
    found: dict[tuple[str, int], dict[str, dict[str, str]]] = {}
    with file.open(newline="") as lines:
        for row in csv.DictReader(lines):
            found.setdefault((row["arm"], int(row["seed"])), {})[row["row"]] = row
    return found


def main() -> None:
    """Print the table."""
    known = runs(CURVES / "again.csv") | {
        key: rows for key, rows in runs(CURVES / "curves.csv").items() if LEARNER in rows
    }
    scores: dict[str, list[float]] = {"mean abs. log-ratio alone": [], "with the correction: what `audit` knows": []}
    lost = []
    for (arm, seed), rows in sorted(known.items()):
        objective, correction, sampler = (*arm.split("+"), "", "")[:3]
        if objective != "grpo" or arm.count("+") != 2 or sampler not in SAMPLERS or LEARNER not in rows:
            continue
        first = rows["1"]
        token = {"none": 0.0, "ais": float(first["correction/alpha"] or 0)}.get(correction, 1.0)
        by_sequence = float("sequence" in correction)
        inputs = audit_inputs(float(first["mismatch/abs_log_ratio"]), 0.0 if by_sequence else token, by_sequence)
        below = float(rows[LEARNER]["val/accuracy"]) - float(known[BASE, seed][LEARNER]["val/accuracy"])
        lost.append(below <= -LOSS)
        for name, score in zip(scores, (inputs["start"], AUDIT.log_odds(inputs)), strict=True):
            scores[name].append(score)
        print(f"{arm} {seed}: {below:+.3f}, probability of a loss {AUDIT.probability(inputs):.2f}")
    print("\n| foretold by | runs judged | that lost | AUROC | 95 % interval |\n| --- | --- | --- | --- | --- |")
    for name, values in scores.items():
        low, high = interval(values, lost)
        print(f"| {name} | {len(lost)} | {sum(lost)} | {auroc(values, lost):.3f} | {low:.3f}–{high:.3f} |")


if __name__ == "__main__":
    main()
