import csv

import pytest

from lit_qrl.callbacks import MismatchMonitor
from tests.run import build, fit


def column(folder, name):
    with (folder / "run" / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


def test_a_coarser_format_shows_a_larger_mismatch(tmp_path):
    kls = []
    for format in ("fp32", "bf16", "fp8_row"):
        fit(tmp_path / format, format=format, trainer={"max_epochs": 1})
        kls.append(column(tmp_path / format, "mismatch/abs_log_ratio")[0])
    assert kls[0] < 1e-5 < kls[1] < kls[2]


def test_every_n_iterations(tmp_path):
    trainer, module, data = build(tmp_path, trainer={"max_epochs": 4})
    monitor = next(c for c in trainer.callbacks if isinstance(c, MismatchMonitor))
    monitor.every_n_iterations = 2
    trainer.fit(module, datamodule=data)
    assert len(column(tmp_path, "mismatch/kl_k3")) == 2


@pytest.mark.parametrize("name", ["kl_k1", "ess_ratio", "chi2_token", "ppl_ratio"])
def test_metrics_stand_in_the_table(tmp_path, name):
    fit(tmp_path, trainer={"max_epochs": 1})
    assert len(column(tmp_path, f"mismatch/{name}")) == 1
