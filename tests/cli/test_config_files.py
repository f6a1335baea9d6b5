import re
from pathlib import Path

import pytest

from lit_qrl.cli.config_files import config_files, expanded, located, run_folder_name
from lit_qrl.errors import ConfigError


@pytest.mark.parametrize(
    ("file", "name"), [("...yaml", "run"), (".yaml", "yaml"), ("a/..b.yaml", "b"), ("v1.2.yaml", "v1.2")]
)
def test_no_name_of_a_configuration_leads_out_of_the_runs(file, name):
    assert run_folder_name(["fit", "--config", file]) == name


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs" / "correction").mkdir(parents=True)
    (tmp_path / "configs" / "quickstart.yaml").write_text("data:\n  group_size: 8\n")
    (tmp_path / "configs" / "correction" / "tis.yaml").write_text("")
    (tmp_path / "README.md").write_text("# Title\n\nWords.\nkey: value\n")
    (tmp_path / "twice.yaml").write_text("a:\n- c: 1\n  b: 2\n  e: {}\n  b: 3\n")
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
    expanded(["fit", "--config", given])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("README.md", r"README\.md, line \d is not YAML: .*Correct the file"),
        ("twice.yaml", r"twice\.yaml holds the key 'b' twice in one place.*lines 3 and 5.*Put them together"),
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
        expanded(["fit", f"--config={given}"])
    assert re.search(words, str(caught.value)), caught.value
    if given == "empty":  # a long choice is cut
        for i in range(9):
            Path(f"empty/{i}.yaml").touch()
        with pytest.raises(ConfigError, match=r"empty/5\.yaml and 3 more\."):
            expanded(["fit", "-c", "empty"])


@pytest.fixture
def lists(tmp_path):
    (tmp_path / "one.yaml").write_text("# Two files.\nconfig: [configs/quickstart.yaml, configs/correction/tis.yaml]\n")
    (tmp_path / "configs" / "two.yaml").write_text("config: [../one.yaml, correction/tis.yaml]\n")
    (tmp_path / "none.yaml").write_text("config: []\n")
    return ["configs/quickstart.yaml", "configs/correction/tis.yaml"]


def test_a_list_of_files_stands_for_them(lists):
    quickstart, tis = lists
    assert list(config_files(expanded(["fit", "--config", "one.yaml"]))) == lists
    args = ["fit", "-c=configs/two.yaml", "--trainer.max_epochs", "3", "--config", quickstart, "-c", "none.yaml"]
    assert expanded(args) == [
        *("fit", "--config", quickstart, "--config", tis, "--config", tis),
        *("--trainer.max_epochs", "3", "--config", quickstart),
    ]


def test_paths_of_a_list_are_relative_to_it(lists, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert list(config_files(expanded(["-c", "~/one.yaml"]))) == [str(tmp_path / path) for path in lists]
    expanded(["fit", "--config=~/configs/quickstart.yaml"])


@pytest.mark.parametrize(
    "args",
    [
        ["fit", "--config", "configs/quickstart.yaml", "-c=configs/correction/tis.yaml", "--a.b", "config"],
        ["fit", "--config", "{data: {seed: 1}}", "--config"],
        ["fit", "--config", "config: [one.yaml]"],
    ],
)
def test_arguments_without_a_list_stay_as_they_are(lists, args):
    assert expanded(args) == args


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("config: [missing.yaml]", "'missing.yaml' does not exist"),
        ("config: [one.yaml]\ndata: {seed: 1}", "holds other keys too.*Given: config, data.*file of their own"),
        ("config: [one.yaml, list.yaml]", "list.yaml lists itself"),
        ("config: [text.yaml]", "text.yaml holds no keys"),
    ],
)
def test_a_list_that_cannot_be_read_is_named(lists, tmp_path, content, words):
    (tmp_path / "list.yaml").write_text(content)
    with pytest.raises(ConfigError) as caught:
        expanded(["fit", "--config", "list.yaml"])
    assert re.search(words, str(caught.value)), caught.value


def test_an_error_of_a_key_says_file_and_line(tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("data:\n  group_size: 8\n")
    second.write_text(
        "# a comment\ntrainer:\n  callbacks+:\n    - class_path: AIS\n      init_args:\n        delta: 3\n"
        "data:\n  group_size: 2\n"
    )
    args = ["fit", "--config", str(first), "-c", str(second)]
    for text, line in (
        ("data.group_size: the value has the wrong type.", 8),
        ("there is no option 'data.group_size'. See --help.", 8),
        ("trainer.callbacks: there is no option 'delta'. See --help.", 6),
    ):
        assert str(located(ConfigError(text), args)) == f"{second}, line {line}: {text}"
    for text in ("Something odd happened.", "data.passes: the value has the wrong type."):
        assert str(located(ConfigError(text), args)) == text
    overridden = [*args, "--data.group_size", "x"]
    assert str(located(ConfigError("data.group_size: wrong."), overridden)) == "data.group_size: wrong."
    nested = "trainer.callbacks: there is no option 'delta'."
    assert str(located(ConfigError(nested), [*args, "--trainer.callbacks.init_args.delta", "3"])) == nested
