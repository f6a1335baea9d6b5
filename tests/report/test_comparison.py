from pathlib import Path

import pytest

from lit_qrl.report import render_comparison
from lit_qrl.report.comparison import labels_of


def test_runs_side_by_side(make_run, tmp_path):
    runs = [make_run("ais/1"), make_run("none/1", correction="none", seed=1, status="interrupt"), tmp_path / "ais"]
    index = render_comparison(runs, tmp_path / "out")
    html = index.read_text()
    assert "ais/1" in html
    assert "none/1" in html
    assert "interrupted" in html
    assert html.count("<tr>") == 4
    assert (tmp_path / "out" / "mismatch.png").stat().st_size > 1000


def test_one_run_can_be_compared_with_nothing(make_run, tmp_path):
    assert render_comparison([make_run(iterations=1)], tmp_path / "out").is_file()


def test_bad_input(make_run, tmp_path):
    with pytest.raises(ValueError, match="at least one"):
        render_comparison([], tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        render_comparison([make_run(), tmp_path / "nowhere"], tmp_path / "out")


@pytest.mark.parametrize(
    "folders, labels",
    [
        (["runs/a/1", "runs/a/2"], ["1", "2"]),
        (["x/runs/a/1", "y/runs/b/1"], ["x/runs/a/1", "y/runs/b/1"]),
        (["runs/a", "runs/a/2"], ["a", "2"]),
        (["runs/a", "runs/a"], ["a (1)", "a (2)"]),
        (["runs/a"], ["a"]),
    ],
)
def test_labels_tell_runs_apart(folders, labels):
    assert labels_of([Path(folder) for folder in folders]) == labels
