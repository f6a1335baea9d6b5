import re
import statistics
from pathlib import Path

import pytest

from lit_qrl.report import render_comparison
from lit_qrl.report.comparison import labels_of
from lit_qrl.report.run import Run


def test_runs_side_by_side(make_run, tmp_path):
    runs = [make_run("ais/1"), make_run("none/1", correction="none", seed=1, status="interrupt"), tmp_path / "ais"]
    index = render_comparison(runs, tmp_path / "out")
    html = index.read_text()
    assert "ais/1" in html
    assert "none/1" in html
    assert "interrupted" in html
    assert html.count('<tr class="') == 3
    assert "seeds" not in html  # three configurations
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


def test_runs_that_differ_in_their_seed_are_one_line_with_a_band(make_run, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("lit_qrl.report.single.draw", lambda figure, sources, labels: seen.append(labels) or b"")
    runs = [make_run(f"ais/{seed}", seed=seed, iterations=4) for seed in (0, 1, 2)]
    for seed, run in enumerate(runs):
        path = run / "config.yaml"
        path.write_text(path.read_text().replace('"seed_everything": 0', f'"seed_everything": {seed}'))
    other = make_run("none/0", correction="none", iterations=4)
    html = render_comparison([*runs, other, runs[0]], tmp_path / "out").read_text()
    assert seen[0] == ["ais (3 seeds)", "none/0"]
    assert "± one standard error of the mean" in html
    assert html.count('<tr class="of"') == 3
    (row,) = re.findall(r'<tr class="mean">.*?</tr>', html, re.DOTALL)
    last = [Run(run).accuracy.last for run in runs]
    shown = [[float(number) for number in pair] for pair in re.findall(r">(0\.\d+) ± ([\d.]+)<", row)]
    assert pytest.approx([statistics.mean(last), statistics.stdev(last) / 3**0.5], abs=5e-4) in shown
