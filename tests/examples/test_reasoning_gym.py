"""The example of reasoning-gym as its page says: a policy that is unsure of sums learns them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.pytorch.accelerators import CUDAAccelerator

from lit_qrl.cli.main import main
from tests.tables import csv_rows

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "reasoning_gym"
CONFIGS = ("--config", "configs/quickstart.yaml", "--config", str(EXAMPLE / "config.yaml"))

pytestmark = pytest.mark.environments


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Make the policy with `steps` of each stage, train it on top of the configs, and return the rows of metrics."""
    monkeypatch.setattr(CUDAAccelerator, "is_available", staticmethod(lambda: False))
    monkeypatch.setattr("lit_qrl.callbacks.report.render", lambda folder: None)  # drawing takes seconds
    monkeypatch.chdir(ROOT)

    def made(warm=(), options=()):
        script = [sys.executable, str(EXAMPLE / "warm_start.py"), "--output", str(tmp_path / "policy"), *warm]
        subprocess.run(script, check=True, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
        policy = ("--model.policy.model", str(tmp_path / "policy"))
        main(["fit", *CONFIGS, *policy, *options, "--trainer.default_root_dir", str(tmp_path / "run")])
        return csv_rows(tmp_path / "run" / "metrics.csv")

    return made


def test_one_iteration(run, tmp_path):
    small = ("--data.prompts_per_iteration", "2", "--data.task.train_size", "64", "--data.task.evaluation_size", "8")
    rows = run(
        ("--steps", "1", "--unsure_steps", "1", "--batch", "8", "--size", "64"), ("--trainer.max_epochs", "1", *small)
    )
    assert any(row.get("reward/mean") for row in rows)
    sample = json.loads((tmp_path / "run" / "samples.jsonl").read_text().splitlines()[0])
    assert sample["prompt"].endswith("=")
    assert int(sample["answer"]) == eval(sample["prompt"].removesuffix("="))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_sums_are_learned(run):
    accuracies = [float(row["val/accuracy"]) for row in run() if row.get("val/accuracy")]
    assert max(accuracies[-2:]) >= accuracies[0] + 0.2
