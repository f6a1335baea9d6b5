from pathlib import Path

import pytest
import torch

from lit_qrl.run import loggers
from lit_qrl.run.loggers import RunCSVLogger
from tests.tables import csv_rows


def rows_of(folder):
    return csv_rows(folder / "metrics.csv")


def filled(folder, epochs, start=0):
    logger = RunCSVLogger(folder)
    for epoch in range(start, epochs):
        logger.log_metrics({"reward/mean": epoch / 10, "epoch": epoch}, step=2 * epoch + 1)
    return logger


def test_every_row_is_on_disk_at_once(tmp_path):
    logger = RunCSVLogger(tmp_path / "new" / "run")
    for epoch in range(3):
        logger.log_metrics({"reward/mean": torch.tensor(epoch / 10), "epoch": epoch}, step=epoch)
        assert len(rows_of(tmp_path / "new" / "run")) == epoch + 1


def test_a_new_metric_adds_a_column_and_loses_no_row(tmp_path):
    logger = filled(tmp_path, 3)
    logger.log_metrics({"val/accuracy": 0.5, "epoch": 2}, step=5)
    logger.log_metrics({"reward/mean": 0.3, "epoch": 3}, step=7)
    rows = rows_of(tmp_path)
    assert [row["reward/mean"] for row in rows] == ["0.0", "0.1", "0.2", "", "0.3"]
    assert [row["val/accuracy"] for row in rows] == ["", "", "", "0.5", ""]
    assert list(rows[0])[:2] == ["epoch", "step"]


def test_a_second_process_continues_the_file(tmp_path):
    filled(tmp_path, 3)
    filled(tmp_path, 5, start=3)
    assert [row["epoch"] for row in rows_of(tmp_path)] == ["0", "1", "2", "3", "4"]


def test_a_line_cut_by_a_crash_is_removed(tmp_path):
    filled(tmp_path, 3)
    path = tmp_path / "metrics.csv"
    path.write_bytes(path.read_bytes()[:-3])
    filled(tmp_path, 4, start=3)
    assert [row["epoch"] for row in rows_of(tmp_path)] == ["0", "1", "3"]
    assert all(None not in row for row in rows_of(tmp_path))


def test_a_file_with_half_a_header_is_started_anew(tmp_path):
    (tmp_path / "metrics.csv").write_text("epoch,st")
    filled(tmp_path, 2)
    assert [row["epoch"] for row in rows_of(tmp_path)] == ["0", "1"]


def test_resuming_drops_what_will_be_run_again(tmp_path):
    logger = filled(tmp_path, 6)
    logger.log_metrics({"late": 1.0}, step=11)
    logger.log_metrics({"early": 1.0}, step=3)
    again = RunCSVLogger(tmp_path)
    again.resume(epoch=4, step=8)
    assert [row["epoch"] for row in rows_of(tmp_path)] == ["0", "1", "2", "3", ""]
    again.log_metrics({"reward/mean": 9.0, "epoch": 4}, step=9)
    assert rows_of(tmp_path)[-1]["reward/mean"] == "9.0"


def test_resuming_without_a_file_is_nothing(tmp_path):
    RunCSVLogger(tmp_path).resume(epoch=4, step=8)
    assert not (tmp_path / "metrics.csv").exists()


def test_starting_over_keeps_the_old_file_aside(tmp_path):
    filled(tmp_path, 3)
    filled(tmp_path, 0).start_over()
    filled(tmp_path, 1).start_over()
    filled(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.1.csv", "metrics.2.csv", "metrics.csv"]
    assert len((tmp_path / "metrics.1.csv").read_text().splitlines()) == 4


def test_a_crash_while_a_column_is_added_leaves_the_old_file(tmp_path, monkeypatch):
    logger = filled(tmp_path, 3)
    before = (tmp_path / "metrics.csv").read_bytes()

    def crash(self, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        logger.log_metrics({"val/accuracy": 0.5, "epoch": 3}, step=7)
    assert (tmp_path / "metrics.csv").read_bytes() == before


def test_non_finite_values_are_written_as_such(tmp_path):
    RunCSVLogger(tmp_path).log_metrics({"a": float("nan"), "b": float("inf")}, step=0)
    assert rows_of(tmp_path) == [{"step": "0", "a": "nan", "b": "inf"}]


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(loggers.rank_zero_only, "rank", 1)
    filled(tmp_path, 2)
    assert not (tmp_path / "metrics.csv").exists()
