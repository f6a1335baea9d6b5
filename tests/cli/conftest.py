"""A command of the Trainer on rows of sums."""

import json

import pytest
import yaml
from lightning.pytorch.accelerators import CUDAAccelerator

from lit_qrl.cli.main import main
from tests.tiny_run import model_folder


@pytest.fixture
def lit(tmp_path, monkeypatch, capfd, caplog):
    """Return (status, what was printed) of a command on rows of sums, in an empty folder with `sums.yaml`."""
    rows = [{"question": f"1+{i}=", "answer": str(i + 1)} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"path": "rows.jsonl", "chat": False, "evaluation_size": 4}
    config = {
        "model": {"policy": {"class_path": "CausalPolicy", "init_args": {"model": model_folder(tmp_path / "model")}}},
        "data": {
            "task": {"class_path": "DatasetTask", "init_args": task},
            "engine": {"class_path": "TransformersEngine"},
            "prompts_per_iteration": 4,
            "group_size": 4,
            "max_prompt_tokens": 8,
            "max_completion_tokens": 4,
        },
        "report": {"samples_per_iteration": 1},
        "trainer": {"accelerator": "cpu", "max_epochs": 1, "limit_val_batches": 0, "enable_progress_bar": False},
    }
    (tmp_path / "sums.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(CUDAAccelerator, "is_available", staticmethod(lambda: False))
    monkeypatch.setattr("lit_qrl.callbacks.report.render", lambda folder: None)  # drawing takes seconds

    def lit(command, *args):
        status = 0
        capfd.readouterr()
        caplog.clear()
        try:
            main([command, "--config", "sums.yaml", *map(str, args)])
        except SystemExit as stop:
            status = stop.code
        printed = capfd.readouterr()
        return status, " ".join((printed.out + printed.err + caplog.text).split())

    return lit
