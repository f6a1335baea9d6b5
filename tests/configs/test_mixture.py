"""The quickstart for mixtures of experts."""

from pathlib import Path

import pytest

from lit_qrl.cli.main import main
from tests.tables import csv_rows

ROOT = Path(__file__).parents[2]


def test_the_quickstart_replays_what_the_sampler_took(tmp_path, monkeypatch, quick_plots):
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # restored when the run has set it
    small = {
        "model.policy.model": ROOT / "models" / "tiny-moe-countdown",
        "data.prompts_per_iteration": 8,
        "data.group_size": 4,
        "trainer.max_epochs": 1,
        "trainer.limit_val_batches": 0,
        "trainer.enable_progress_bar": "false",
        "trainer.callbacks.compare_every": 1,
        "trainer.default_root_dir": tmp_path / "run",
    }
    options = (f"--{key}={value}" for key, value in small.items())
    main(["fit", f"--config={ROOT / 'configs' / 'quickstart_moe.yaml'}", *options])
    row = next(row for row in csv_rows(tmp_path / "run" / "metrics.csv") if row.get("routing/megabytes"))
    assert 0 < float(row["routing/replayed_kl_k3"]) < float(row["routing/free_kl_k3"]) < 0.1
    # With one update TruncatedIS and the metrics take the training forward's log-probs: the same, replayed.
    assert float(row["mismatch/kl_k3"]) == pytest.approx(float(row["routing/replayed_kl_k3"]), rel=0.05)
    assert 0 < float(row["routing/differing_tokens"]) < 0.5
    assert float(row["routing/unused_experts"]) == 0
