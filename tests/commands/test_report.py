import pytest

from lit_qrl.commands.report import main
from lit_qrl.errors import ConfigError


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "quickstart" / "1"
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text("epoch,step,reward/mean\n0,0,0.5\n1,1,0.6\n")
    return folder


def test_one_run(run, capsys):
    main([str(run)])
    assert capsys.readouterr().out.strip() == str(run / "report" / "index.html")
    assert (run / "report" / "index.html").is_file()


def test_several_runs(run, tmp_path, capsys):
    main([str(run), str(run), "--out", str(tmp_path / "both")])
    assert capsys.readouterr().out.strip() == str(tmp_path / "both" / "index.html")


def test_several_runs_without_a_place_go_into_the_working_directory(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main([str(run), str(run)])
    assert (tmp_path / "comparison" / "index.html").is_file()


def test_the_folder_above_a_run_names_the_run(run):
    with pytest.raises(ConfigError, match=r"Did you mean .*quickstart/1\?"):
        main([str(run.parent)])


def test_a_typo_names_the_nearest_folder(run):
    with pytest.raises(ConfigError, match="quickstart"):
        main([str(run.parent.parent / "quickstrat")])


def test_a_place_that_cannot_be_written(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--out"):
        main([str(run), "--out", str(tmp_path / "file" / "inside")])


def test_no_run_is_an_error_of_usage():
    with pytest.raises(ConfigError, match=r"required: RUN\. See lit-qrl report --help"):
        main([])
