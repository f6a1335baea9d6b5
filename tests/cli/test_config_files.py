import re

import pytest

from lit_qrl.cli.config_files import check_config_files, config_files
from lit_qrl.errors import ConfigError


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs" / "correction").mkdir(parents=True)
    (tmp_path / "configs" / "quickstart.yaml").write_text("data:\n  group_size: 8\n")
    (tmp_path / "configs" / "correction" / "tis.yaml").write_text("")
    (tmp_path / "README.md").write_text("# Title\n\nWords.\nkey: value\n")
    (tmp_path / "text.yaml").write_text("only words")
    (tmp_path / "model.bin").write_bytes(b"\xff\x00\xfe")
    (tmp_path / "empty").mkdir()


@pytest.mark.parametrize(
    ("args", "found"),
    [
        (["fit", "--config", "a.yaml", "-c", "b.yaml"], ["a.yaml", "b.yaml"]),
        (["fit", "--config=a.yaml", "-c=b.yaml", "--config.like", "c"], ["a.yaml", "b.yaml"]),
        (["fit", "--config"], [""]),
        (["fit"], []),
    ],
)
def test_the_files_after_config(args, found):
    assert list(config_files(args)) == found


@pytest.mark.parametrize(
    "given",
    [
        "configs/quickstart.yaml",
        "configs/correction/tis.yaml",
        "{data: {seed: 1}}",
        "data: 1",
        "s3://bucket/a.yaml",
        "",
    ],
)
def test_what_can_be_read_and_what_is_no_path_passes(given):
    check_config_files(["fit", "--config", given])


def test_the_home_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    check_config_files(["fit", "--config=~/configs/quickstart.yaml"])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("README.md", r"README\.md, line \d is not YAML: .*Correct the file"),
        ("text.yaml", r"text\.yaml holds no keys.*data: {group_size: 8}.*Given: only words"),
        ("model.bin", r"model\.bin is not YAML.*text"),
        ("configs", r"takes a file.*the folder configs.*configs/quickstart\.yaml, configs/correction/tis\.yaml\."),
        ("empty", r"takes a file.*the folder empty\.$"),
        (
            "configs/quikstart.yaml",
            r"'configs/quikstart\.yaml' does not exist\. Did you mean 'configs/quickstart\.yaml'\?",
        ),
        ("quickstart.yml", r"Did you mean 'configs/quickstart\.yaml'\?"),
        ("configs/tis.yaml", r"Did you mean 'configs/correction/tis\.yaml'\?"),
        ("config/quickstart.yaml", r"Did you mean 'configs/quickstart\.yaml'\?"),
        ("configs/zzz.yaml", r"Choose one of configs/quickstart\.yaml, "),
        ("empty/zzz.yaml", r"'empty/zzz\.yaml' does not exist\. Check the path\."),
    ],
)
def test_what_cannot_be_read_is_named(given, words):
    with pytest.raises(ConfigError) as caught:
        check_config_files(["fit", f"--config={given}"])
    assert re.search(words, str(caught.value)), caught.value


def test_a_long_choice_is_cut(tmp_path):
    for i in range(9):
        (tmp_path / "empty" / f"{i}.yaml").touch()
    with pytest.raises(ConfigError, match=r"empty/5\.yaml and 3 more\."):
        check_config_files(["fit", "-c", "empty"])
