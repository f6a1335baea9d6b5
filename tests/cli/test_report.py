import pytest

from lit_qrl.cli.parser import run as called
from lit_qrl.cli.report import report
from lit_qrl.errors import ConfigError


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "quickstart" / "1"
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text("epoch,step,reward/mean\n0,0,0.5\n1,1,0.6\n")
    return folder


def test_one_run(run, capsys):
    assert report([run]) == run / "report" / "index.html"
    assert capsys.readouterr().out.strip() == str(run / "report" / "index.html")
    assert (run / "report" / "index.html").is_file()


def test_several_runs(run, tmp_path, capsys):
    called(report, [str(run), str(run), "--out", str(tmp_path / "both")])
    assert capsys.readouterr().out.strip() == str(tmp_path / "both" / "index.html")


def test_several_runs_without_a_place_go_beside_the_first(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    called(report, ["quickstart/1", str(run)])
    assert capsys.readouterr().out.strip() == "quickstart/comparison/index.html"
    assert (tmp_path / "quickstart" / "comparison" / "index.html").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["quickstart"]


def test_a_place_that_cannot_be_written(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--out"):
        called(report, [str(run), "--out", str(tmp_path / "file" / "inside")])


def test_no_run_is_an_error_of_usage():
    with pytest.raises(ConfigError, match=r"required: RUN\. See lit-qrl report --help"):
        called(report, [])
