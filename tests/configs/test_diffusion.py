"""The quickstart of masked diffusion, and what its report shows."""

import json
from pathlib import Path

from lit_qrl.cli.main import main
from tests.tables import csv_rows

ROOT = Path(__file__).parents[2]


def test_the_quickstart_draws_in_fp8_and_tells_the_order_of_unmasking(tmp_path, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # restored when the run has set it
    small = {
        "model.policy.model": ROOT / "models" / "tiny-diffusion-sudoku",
        "data.task.train_size": 64,
        "data.prompts_per_iteration": 4,
        "data.group_size": 4,
        "trainer.max_epochs": 1,
        "trainer.limit_val_batches": 0,
        "trainer.enable_progress_bar": "false",
        "trainer.default_root_dir": tmp_path / "run",
    }
    options = (f"--{key}={value}" for key, value in small.items())
    main(["fit", f"--config={ROOT / 'configs' / 'quickstart_diffusion.yaml'}", *options])
    row = next(row for row in csv_rows(tmp_path / "run" / "metrics.csv") if row.get("mismatch/abs_log_ratio"))
    assert 0 < float(row["mismatch/abs_log_ratio"]) < 0.2
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    for sample in samples:
        assert len(sample["completion"]) == 16
        assert sorted(sample["unmasked_at"]) == [step for step in range(8) for _ in range(2)]
    assert "Order of unmasking" in (tmp_path / "run" / "report" / "index.html").read_text()
