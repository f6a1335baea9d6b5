import json

import pytest

from lit_qrl.report import render
from lit_qrl.report.figures import draw_histograms

FLAT = {
    "title": "log-ratio <b>",
    "x": {"label": "nats", "edges": [-1, 0, 1]},
    "counts": {"A > 0": [3, 0], "A < 0": [0, 5]},
    "lines": [0.2],
}
MAP = {
    "title": "ratio and probability",
    "x": {"label": "nats", "edges": [-1, 0, 1]},
    "y": {"label": "p", "edges": [0, 0.3, 0.6, 1]},
    "counts": [[1, 0, 100], [0, 0, 7]],
}


def run_with(folder, content):
    (folder / "histograms.json").write_text(json.dumps(content))


@pytest.mark.parametrize("histograms", [[FLAT], [MAP], [FLAT, MAP, FLAT, MAP, FLAT]])
def test_they_are_drawn(histograms):
    assert draw_histograms(histograms)[1:4] == b"PNG"


def test_means_stand_on_a_linear_scale():
    linear = {**FLAT, "scale": "linear", "counts": {"mean": [0.001, 0.002]}}
    assert draw_histograms([linear]) != draw_histograms([{**linear, "scale": "log"}])


def test_counts_of_zero_everywhere():
    empty = [{**FLAT, "counts": {"A": [0, 0]}}, {**MAP, "counts": [[0, 0, 0], [0, 0, 0]]}]
    assert draw_histograms(empty)[1:4] == b"PNG"


BROKEN = (
    {"x": None},
    {"x": {"edges": [0]}},
    {"counts": {"A": [1, 2, 3]}},
    {"counts": None},
    {"counts": {"A": ["b", 2]}},
)


@pytest.mark.parametrize(
    "content", [{}, [], {"histograms": 3}, *({"histograms": [FLAT | one]} for one in BROKEN), {"histograms": ["text"]}]
)
def test_no_histograms(tmp_path, content):
    run_with(tmp_path, content)
    assert "Histograms" not in render(tmp_path).read_text()


def test_they_stand_in_the_report(tmp_path):
    run_with(tmp_path, {"iteration": 7, "histograms": [FLAT]})
    html = render(tmp_path).read_text()
    assert "The tokens of iteration 7." in html
    assert "log-ratio <b>" not in html
    assert (tmp_path / "report" / "histograms.png").is_file()
