"""The quickstarts of masked diffusion, and what its report shows, and of mixtures of experts."""

from pathlib import Path

import pytest

from lit_qrl.cli.main import main
from lit_qrl.run.event_log import read_jsonl
from tests.tables import csv_rows

ROOT = Path(__file__).parents[2]


def first_row(run, name, monkeypatch, **options):
    """Run one iteration of a quickstart with other options, and return its metrics."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # restored when the run has set it
    trainer = {"max_epochs": 1, "limit_val_batches": 0, "enable_progress_bar": "false", "default_root_dir": run}
    options |= {f"trainer.{key}": value for key, value in trainer.items()}
    main(["fit", f"--config={ROOT / 'configs' / f'{name}.yaml'}", *(f"--{key}={one}" for key, one in options.items())])
    return next(row for row in csv_rows(run / "metrics.csv") if row.get("mismatch/kl_k3"))


def test_masked_diffusion_draws_in_fp8_and_tells_the_order_of_unmasking(tmp_path, monkeypatch):
    sizes = {"data.task.train_size": 64, "data.prompts_per_iteration": 4, "data.group_size": 4}
    policy = {"model.policy.model": ROOT / "models" / "tiny-diffusion-sudoku"}
    row = first_row(tmp_path, "quickstart_diffusion", monkeypatch, **policy, **sizes)
    assert 0 < float(row["mismatch/abs_log_ratio"]) < 0.2
    samples = read_jsonl(tmp_path / "samples.jsonl")
    assert samples
    for sample in samples:
        assert len(sample["completion"]) == 16
        assert sorted(sample["unmasked_at"]) == [step for step in range(8) for _ in range(2)]
    assert "Order of unmasking" in (tmp_path / "report" / "index.html").read_text()


def test_a_mixture_replays_what_the_sampler_took(tmp_path, monkeypatch, quick_plots):
    sizes = {"data.prompts_per_iteration": 8, "data.group_size": 4, "trainer.callbacks.compare_every": 1}
    policy = {"model.policy.model": ROOT / "models" / "tiny-moe-countdown"}
    row = first_row(tmp_path, "quickstart_moe", monkeypatch, **policy, **sizes)
    assert 0 < float(row["routing/replayed_kl_k3"]) < float(row["routing/free_kl_k3"]) < 0.1
    # With one update TruncatedIS and the metrics take the training forward's log-probs: the same, replayed.
    assert float(row["mismatch/kl_k3"]) == pytest.approx(float(row["routing/replayed_kl_k3"]), rel=0.05)
    assert 0 < float(row["routing/differing_tokens"]) < 0.5
    assert float(row["routing/unused_experts"]) == 0
