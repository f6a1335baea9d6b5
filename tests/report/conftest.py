"""A run folder that looks like a real one: every file, every metric, deterministic noise."""

import csv
import json
import math
import random
from pathlib import Path

import pytest

from lit_qrl.functional.diagnostics import QUADRANTS


def write_run(
    folder: Path,
    iterations: int = 12,
    seed: int = 0,
    correction: str = "AIS",
    drift: float = 1.0,
    status: str = "finish",
) -> Path:
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"epoch": 0, "step": 0, "val/accuracy": 0.36, "val/greedy_pass@1": 0.41, "val/pass@4": 0.62}]
    samples = []
    for epoch in range(iterations):
        x = (epoch + 1) / iterations
        skill = 0.36 + 0.42 * (1 - math.exp(-2.5 * x))
        kl = drift * (0.0012 + 0.004 * x**2) * rng.uniform(0.8, 1.25)
        usual = {"rollout": 0.5, "score": 0.12, "update": 0.3, "publish": 0.04}
        seconds = {phase: time * rng.uniform(0.9, 1.2) for phase, time in usual.items()}
        step = 2 * epoch + 1
        if (epoch + 1) % max(iterations // 10, 1) == 0:
            seconds["evaluate"] = 0.8
            accuracies = {"val/accuracy": skill + rng.gauss(0, 0.012), "val/greedy_pass@1": skill + 0.05}
            rows.append({"epoch": epoch, "step": step, **accuracies, "val/pass@4": min(skill + 0.22, 1)})
        alpha = min(1.0, 25 * kl) * 0.95
        row = {
            "epoch": epoch,
            "step": step,
            "reward/mean": skill + rng.gauss(0, 0.03),
            "reward/std": math.sqrt(skill * (1 - skill)),
            "reward/countdown": skill + rng.gauss(0, 0.03),
            "reward/format": 0.97 + 0.02 * x,
            "mismatch/kl_k1": kl + rng.gauss(0, 0.0006),
            "mismatch/kl_k3": kl,
            "mismatch/abs_log_ratio": 3 * kl,
            **{f"mismatch/share_{name}": 0.25 for name in QUADRANTS},
            "mismatch/abs_prob_diff": 0.01 + 2.2 * kl,
            "mismatch/ess_ratio": max(1 - 18 * kl, 0.2),
            "update/entropy": 0.9 * math.exp(-1.6 * x) + 0.08,
            "update/clip_fraction_low": 0.01 * x * rng.random(),
            "update/clip_fraction_high": 0.02 * x * rng.random(),
            "update/kl": 0.0006 * rng.uniform(0.6, 1.4),
            "update/loss": rng.gauss(-0.01, 0.02),
            "update/grad_norm": rng.uniform(0.2, 0.5),
            "rollout/length": 14 + 3 * x + rng.gauss(0, 0.4),
            "rollout/tokens_per_second": rng.uniform(7800, 9000),
            "rollout/stopped": 0.99,
            **{f"time/{phase}": value for phase, value in seconds.items()},
            "time/iteration": sum(seconds.values()),
            "publish/version": epoch,
            "publish/bytes": 1.1e6,
        }
        if correction == "AIS":
            row |= {
                "correction/alpha": alpha,
                "correction/reliability": 1 - 6 * kl,
                "correction/necessity": min(1.0, 25 * kl),
                "correction/variance_penalty": max(0.0, rng.gauss(0, 0.02)),
            }
        rows.append(row)
        for _ in range(3):
            right = rng.random() < skill
            first, second, third = (rng.randint(1, 50) for _ in range(3))
            texts = {"prompt": f"{first} {second} {third} = 42", "completion": f"({first} + {second}) * {third}"}
            scores = {"reward": float(right), "parts": {"countdown": float(right), "format": 1.0}, "correct": right}
            samples.append({"iteration": epoch + 1, "version": epoch, **texts, **scores})
    columns = ["epoch", "step", *sorted({name for row in rows for name in row} - {"epoch", "step"})]
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    start, half = 1_760_000_000.0, max(iterations // 2, 1)
    began = {
        "corrections": [] if correction == "none" else [correction],
        "format": "fp8_tensor",
        "device": "2 CPU threads",
    }
    events = [
        {"time": start, "iteration": 0, "kind": "start", "message": "Training started.", **began},
        {
            "time": start + 20,
            "iteration": half,
            "kind": "mismatch",
            "message": "the ESS ratio 0.9021 is under a floor.",
        },
        {"time": start + iterations * 1.1, "iteration": iterations, "kind": status, "message": "Training ended."},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    parts = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    layers = {f"model.layers.{i}.{part}.weight": "fp8_tensor" for i in range(4) for part in parts}
    layers |= {"model.embed_tokens.weight": "bf16", "model.norm.weight": "bf16"}
    (folder / "publish.json").write_text(json.dumps({"version": iterations - 1, "layers": layers}))
    callbacks = [] if correction == "none" else [{"class_path": f"lit_qrl.callbacks.{correction}"}]
    policy = {"class_path": "CausalPolicy", "init_args": {"model": "models/tiny-countdown"}}
    config = {
        "seed_everything": 0,
        "model": {"policy": policy},
        "data": {"task": {"class_path": "lit_qrl.data.Countdown"}, "group_size": 8},
        "publisher": {"format": "fp8_tensor"},
        "trainer": {"max_epochs": iterations, "callbacks": callbacks},
    }
    (folder / "config.yaml").write_text(json.dumps(config, indent=1))
    return folder


@pytest.fixture
def make_run(tmp_path):
    """Return a function that writes a run folder under the test's own folder."""
    return lambda name="run", **options: write_run(tmp_path / name, **options)
