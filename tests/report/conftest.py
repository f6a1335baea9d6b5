"""A run folder that looks like a real one: every file, every metric, deterministic noise."""

import csv
import json
import random
from pathlib import Path

import pytest

from lit_qrl.functional.diagnostics import QUADRANTS

EVALUATED = {"val/accuracy": 0.5, "val/greedy_pass@1": 0.55, "val/pass@4": 0.7}
LOGGED = {
    "reward/mean": 0.5, "reward/std": 0.4, "reward/countdown": 0.5, "reward/format": 0.7,
    "mismatch/kl_k1": 0.001, "mismatch/kl_k3": 0.002, "mismatch/abs_log_ratio": 0.006, "mismatch/abs_prob_diff": 0.014,
    "mismatch/ess_ratio": 0.7, **{f"mismatch/share_{name}": 0.25 for name in QUADRANTS},
    "update/entropy": 0.5, "update/clip_fraction_low": 0.01, "update/clip_fraction_high": 0.02, "update/kl": 6e-4,
    "update/loss": -0.01, "update/grad_norm": 0.3,
    "rollout/length": 15.0, "rollout/tokens_per_second": 8e3, "rollout/stopped": 0.7,
    "time/rollout": 0.5, "time/score": 0.12, "time/update": 0.3, "time/publish": 0.04, "time/iteration": 1.5,
    "publish/version": 1, "publish/bytes": 1e6,
}  # fmt: skip
CORRECTED = {f"correction/{name}": 0.5 for name in ("alpha", "reliability", "necessity", "variance_penalty")}


def write_run(folder: Path, iterations=12, seed=0, correction="AIS", status="finish") -> Path:
    rng = random.Random(seed)
    logged = {**LOGGED, **(CORRECTED if correction == "AIS" else {})}

    def row(epoch, step, levels):
        return {"epoch": epoch, "step": step, **{name: rng.uniform(0.8, 1.3) * level for name, level in levels.items()}}

    rows = [row(0, 0, EVALUATED)]
    for epoch in range(iterations):
        rows.append(row(epoch, 2 * epoch + 1, logged))
        if (epoch + 1) % max(iterations // 10, 1) == 0:
            rows.append(row(epoch, 2 * epoch + 1, {**EVALUATED, "time/evaluate": 0.8}))
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["epoch", "step", *logged, *EVALUATED, "time/evaluate"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    sample = {"prompt": "1 2 3 = 42", "completion": "(1 + 2) * 3", "reward": 1.0, "parts": {"format": 1.0}}
    samples = [{"iteration": 1 + i // 3, "version": i // 3, **sample, "correct": True} for i in range(3 * iterations)]
    corrections = [] if correction == "none" else [correction]
    began = {"corrections": corrections, "format": "fp8_tensor", "device": "2 CPU threads", "message": "It started."}
    events = [
        {"time": 1.76e9, "iteration": 0, "kind": "start", **began},
        {"time": 1.76e9 + 20, "iteration": 1, "kind": "mismatch", "message": "the ESS ratio 0.9021 is under a floor."},
        {"time": 1.76e9 + 40, "iteration": iterations, "kind": status, "message": "Training ended."},
    ]
    for name, records in (("samples", samples), ("events", events)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    parts = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    layers = {f"model.layers.{i}.{part}.weight": "fp8_tensor" for i in range(4) for part in parts}
    layers |= {"model.embed_tokens.weight": "bf16", "model.norm.weight": "bf16"}
    (folder / "publish.json").write_text(json.dumps({"version": iterations - 1, "layers": layers}))
    config = {
        "seed_everything": 0,
        "model": {"policy": {"class_path": "CausalPolicy", "init_args": {"model": "models/tiny-countdown"}}},
        "data": {"task": {"class_path": "lit_qrl.data.Countdown"}, "group_size": 8},
        "trainer": {"max_epochs": iterations, "callbacks": [{"class_path": name} for name in corrections]},
    }
    (folder / "config.yaml").write_text(json.dumps(config, indent=1))
    return folder


@pytest.fixture
def make_run(tmp_path):
    """Return a function that writes a run folder under the test's own folder."""
    return lambda name="run", **options: write_run(tmp_path / name, **options)
