import json
import re
from html.parser import HTMLParser

import pytest

from lit_qrl.report import render
from lit_qrl.report.page import CHARACTERS_SHOWN
from lit_qrl.report.run import Run
from lit_qrl.report.single import accuracy_change

VOID = {"meta", "img", "source", "col", "br", "input"}


class Balanced(HTMLParser):
    """Fails on a closing tag that closes nothing; keeps the text by tag."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(index):
    html = index.read_text()
    parser = Balanced()
    parser.feed(html)
    assert parser.open == []
    return html, "\n".join(parser.text)


def test_the_page_of_a_whole_run(make_run):
    folder = make_run()
    index = render(folder)
    assert index == folder / "report" / "index.html"
    html, text = read(index)
    assert "finished" in text
    assert "fp8_tensor" in text
    assert "AIS" in text
    assert "models/tiny-countdown · Countdown · 2 CPU threads" in text
    assert "model.layers.*.mlp.up_proj.weight" in text
    assert "28 × fp8_tensor, 2 × bf16" in text
    assert "– – –" not in text  # of what has no interval
    assert not re.search(r"(?:src|href)=['\"](?!data:|#)", html)
    names = {path.name for path in index.parent.iterdir()}
    assert names == {
        "index.html",
        *(f"{k}.png" for k in ("learning", "mismatch", "correction", "policy", "update", "time")),
    }


def test_tiles_tell_the_numbers_of_the_run(make_run, quick_plots):
    folder = make_run(iterations=12)
    run = Run(folder)
    _, text = read(render(folder))
    for how, name in (("sampled", "val/accuracy"), ("greedy", "val/greedy_pass@1")):
        values = run.series(name).values
        change = f"{values[0]:.3f} → {values[-1]:.3f} {values[-1] - values[0]:+.3f}"
        assert f"Held-out accuracy, {how} {change}" in " ".join(text.split())
    ess = run.series("mismatch/ess_ratio")
    assert f"{min(ess.values):.3f}" in text
    assert f"at iteration {ess.iterations[ess.values.index(min(ess.values))]}" in text


def test_what_a_policy_writes_is_only_text(make_run, quick_plots):
    folder = make_run(iterations=1)
    hostile = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>'\"&amp;"
    sample = {"iteration": 1, "version": hostile, "prompt": hostile, "completion": hostile, "reward": hostile}
    with (folder / "samples.jsonl").open("a") as file:
        file.write(json.dumps({**sample, "parts": {hostile: hostile, "b": 1.0}}) + "\n")
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": 1, "kind": hostile, "message": hostile, "iteration": hostile}) + "\n")
    (folder / "publish.json").write_text(json.dumps({"layers": {hostile: hostile}, "version": hostile}))
    (folder / "config.yaml").write_text(hostile)
    html, text = read(render(folder))
    assert html.count("<script") == html.count("</script") == 1  # the page's own
    assert "<img src=x" not in html
    assert text.count(hostile) >= 7


@pytest.mark.parametrize(
    "files", [{}, {"metrics.csv": "epoch,step\n"}, {"metrics.csv": ""}, {"config.yaml": "seed: 0"}]
)
def test_an_empty_run_has_a_page(tmp_path, files):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    _, text = read(render(tmp_path))
    assert "No metrics have been logged yet" in text


def test_a_run_that_was_cut_anywhere_has_a_page(make_run):
    folder = make_run(iterations=2)
    for name in ("metrics.csv", "samples.jsonl", "events.jsonl", "publish.json", "config.yaml"):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) * 2 // 3])
    read(render(folder))


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        render(tmp_path / "nowhere")


def test_long_completions_and_many_events_are_shortened_where_the_page_is_asked_for(make_run, tmp_path, quick_plots):
    folder = make_run(iterations=1)
    with (folder / "samples.jsonl").open("w") as file:
        file.write(json.dumps({"iteration": 1, "prompt": "p", "completion": "x" * 50_000, "reward": 1}) + "\n")
    with (folder / "events.jsonl").open("a") as file:
        file.writelines(
            json.dumps({"kind": "guard", "message": f"event {i}", "iteration": 1}) + "\n" for i in range(500)
        )
    index = render(folder, tmp_path / "deep" / "page")
    assert index == tmp_path / "deep" / "page" / "index.html"
    _, text = read(index)
    assert max(len(run) for run in re.findall("x+", text)) == CHARACTERS_SHOWN
    assert "44000 more characters" in text
    assert "event 499" in text
    assert "event 1\n" not in text
    assert "The last 200 of 503 events" in text


def test_the_change_of_accuracy(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("epoch,step,val/accuracy,reward/mean\n0,0,0.5,\n0,1,,0.1\n1,3,0.25,\n")
    assert accuracy_change(Run(tmp_path).accuracy) == ("0.500 → 0.250", "-0.250", "down")
    path.write_text("epoch,step,val/accuracy\n0,0,0.5\n")
    assert accuracy_change(Run(tmp_path).accuracy) == ("0.500", "at iteration 0", "")
    path.write_text("epoch,step,reward/mean\n0,0,0.5\n")
    assert accuracy_change(Run(tmp_path).accuracy) == ("–", "", "")


def test_the_last_evaluation_is_a_table_with_intervals(tmp_path):
    names = [f"val/math/pass@1{bound}" for bound in ("", "_ci_low", "_ci_high")]
    (tmp_path / "metrics.csv").write_text(f"epoch,step,{','.join(names)}\n0,0,0.125,0.1,0.2\n4,4,0.5,0.375,0.625\n")
    page = render(tmp_path).read_text()
    table = page.split('id="evaluation"')[1].split("</table>")[0]
    for text in ("math", "pass@1", "0.125", "0.500", "0.375 – 0.625"):
        assert text in table, text


def test_the_shares_of_weights_are_tiles(make_run, quick_plots):
    folder = make_run(iterations=1)
    receipts = json.loads((folder / "publish.json").read_text())
    (folder / "publish.json").write_text(json.dumps({**receipts, "quantized_share": 0.9876, "verified_share": 1.0}))
    text = " ".join(read(render(folder))[1].split())
    assert "Weights quantized 98.8 % of the parameters" in text
    assert "Weights verified 100.0 % of the bytes sent" in text


@pytest.mark.parametrize("missing", ["samples.jsonl", "events.jsonl", "publish.json", "config.yaml", "metrics.csv"])
def test_a_run_without_one_of_its_files_has_a_page(make_run, quick_plots, missing):
    folder = make_run(iterations=2)
    (folder / missing).unlink()
    html, _ = read(render(folder))
    assert ('id="samples"' in html) == (missing != "samples.jsonl")


def test_a_run_of_an_older_version_has_a_page(tmp_path, quick_plots):
    """One row of a few columns, samples of texts alone, receipts without shares."""
    (tmp_path / "metrics.csv").write_text(
        "epoch,step,reward/mean,val/accuracy,time/rollout\n0,0,0.5,,2.5\n0,0,,0.25,\n"
    )
    (tmp_path / "samples.jsonl").write_text('{"iteration": 1, "prompt": "1+1=", "completion": "2", "reward": 1.0}\n')
    (tmp_path / "publish.json").write_text('{"version": 0, "layers": {"a": "bf16"}}')
    html, text = read(render(tmp_path))
    assert "1+1=" in text
    assert "Gold answer" not in text
    assert 'class="legend"' not in html
    assert re.search(r"rollout, the rest\s+2\.5 s", text)
