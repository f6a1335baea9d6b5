from pathlib import Path

import pytest

from lit_qrl.cli.runs import meant


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in [*(f"runs/quickstart/{i}" for i in range(1, 12)), "runs/quickstart/validate/1", "runs/mine/2"]:
        Path(name).mkdir(parents=True)
        Path(name, "config.yaml").touch()
    Path("configs/task").mkdir(parents=True)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("runs/quickstart", "Did you mean runs/quickstart/11?"),
        ("runs/quikstart", "Did you mean runs/quickstart/11?"),
        ("runs/nope", "Choose one of runs/mine/2, runs/quickstart/11."),
        ("runs", "Choose one of runs/mine/2, runs/quickstart/11."),
        ("configs", "Choose one of runs/mine/2, runs/quickstart/11."),
        ("configs/task", "Choose one of runs/mine/2, runs/quickstart/11."),
        ("runs/quickstart/42", "Did you mean runs/quickstart/11?"),
    ],
)
def test_the_run_that_was_meant(given, sentence):
    assert meant(Path(given)) == sentence


def test_a_long_choice_is_cut():
    for i in range(6):
        Path(f"runs/more{i}/1").mkdir(parents=True)
        Path(f"runs/more{i}/1/metrics.csv").touch()
    assert meant(Path("runs")).endswith("runs/more3/1 and 3 more.")


def test_without_any_run_the_way_to_one_is_named(tmp_path):
    assert meant(tmp_path / "configs", runs=tmp_path / "nothing") == "lit-qrl fit makes one, under runs/."
