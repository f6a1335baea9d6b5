"""Loggers of Lightning without a place of their own, and the settings that they are given."""

import json

import yaml
from jsonargparse import Namespace
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from lit_qrl.cli.training import give_place


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


def test_loggers_write_into_the_run_folder_and_get_every_setting(lit, tmp_path):
    loggers = [{"class_path": name} for name in ("TensorBoardLogger", "CSVLogger", f"{__name__}.Recorder")]
    corrections = [{"class_path": "TruncatedIS", "init_args": {"upper": 3.0}}]
    place = TensorBoardLogger.__init__.__defaults__
    status, text = lit(
        *("fit", "--publisher.format", "fp8_row", "--trainer.logger", json.dumps(loggers)),
        *("--model.objective", "GRPO", "--model.objective.clip_high", 0.28, "--model.optimizer.lr", 1e-3),
        *("--trainer.callbacks", json.dumps(corrections)),
    )
    assert status == 0, text
    logs = tmp_path / "runs" / "sums" / "1" / "lightning_logs"
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
