"""Loggers of Lightning without a place of their own, and the settings that they are given."""

import json

import yaml
from jsonargparse import Namespace
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from lit_qrl.cli.main import main
from lit_qrl.cli.training import give_place
from tests.tiny_run import model_folder


class Recorder(Logger):
    """Stands in for the loggers of services: it has a place of its own and keeps what it is given."""

    given: dict = {}

    name = version = "recorder"

    def __init__(self, save_dir: str = "elsewhere") -> None:
        super().__init__()

    def log_hyperparams(self, params, *args, **kwargs):
        Recorder.given = dict(params)

    def log_metrics(self, metrics, step=None):
        pass


def test_only_a_place_that_was_left_out_is_the_run_folder(tmp_path):
    mine, left = (Namespace(class_path="a.B", init_args=Namespace(save_dir=place)) for place in ("mine", None))
    other = Namespace(class_path="a.C", init_args=Namespace(project="p"))
    give_place([mine, left, other], tmp_path)
    assert (mine.init_args.save_dir, left.init_args.save_dir) == ("mine", str(tmp_path))
    assert "save_dir" not in other.init_args
    for nothing in (None, True, False):
        give_place(nothing, tmp_path)


def test_loggers_write_into_the_run_folder_and_get_every_setting(tmp_path, monkeypatch):
    rows = [{"question": f"1+{i}=", "answer": str(i + 1)} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    recorder = {"class_path": f"{__name__}.Recorder"}
    settings = {
        "model": {
            "policy": {"class_path": "CausalPolicy", "init_args": {"model": model_folder(tmp_path / "model")}},
            "objective": {"class_path": "GRPO", "init_args": {"clip_high": 0.28}},
            "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3}},
        },
        "data": {
            "task": {
                "class_path": "DatasetTask",
                "init_args": {"path": "rows.jsonl", "chat": False, "evaluation_size": 4},
            },
            "engine": {"class_path": "TransformersEngine"},
            "prompts_per_iteration": 4,
            "group_size": 4,
            "max_prompt_tokens": 8,
            "max_completion_tokens": 4,
        },
        "publisher": {"format": "fp8_row"},
        "trainer": {
            "accelerator": "cpu",
            "max_epochs": 1,
            "limit_val_batches": 0,
            "enable_progress_bar": False,
            "default_root_dir": "run",
            "logger": [{"class_path": "TensorBoardLogger"}, {"class_path": "CSVLogger"}, recorder],
            "callbacks": [{"class_path": "TruncatedIS", "init_args": {"upper": 3.0}}],
        },
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    place = TensorBoardLogger.__init__.__defaults__
    main(["fit", "--config", "config.yaml"])
    logs = tmp_path / "run" / "lightning_logs"
    (board,), (table,) = logs.glob("*/events.out*"), logs.glob("*/metrics.csv")
    written, again = (yaml.safe_load(file.with_name("hparams.yaml").read_text()) for file in (board, table))
    expected = {
        "model.objective.clip_high": 0.28,
        "model.optimizer.lr": 1e-3,
        "data.group_size": 4,
        "publisher.format": "fp8_row",
        "trainer.callbacks.TruncatedIS.upper": 3.0,
        "seed_everything": 0,
    }
    for found in (written, again, Recorder.given):
        assert {key: found.get(key) for key in expected} == expected
    assert TensorBoardLogger.__init__.__defaults__ == place  # the constructors stay as they are
    assert CSVLogger(str(tmp_path)).save_dir == str(tmp_path)
