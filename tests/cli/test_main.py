import gc
import importlib
import re
import signal
import subprocess
import sys
from importlib.machinery import PathFinder

import pytest

from lit_qrl import __version__
from lit_qrl.cli.main import COMMANDS, TRAINING, fail, main, overview, uncollected
from tests.command_line import status_of


def printed(capsys, *args):
    main(list(args))
    return capsys.readouterr().out


@pytest.mark.parametrize("args", [[], ["-h"], ["--help"]])
def test_help_lists_every_command(args, capsys):
    text = printed(capsys, *args)
    for name, what in {**TRAINING, **COMMANDS}.items():
        assert re.search(rf"^  {name} +{re.escape(what)}$", text, re.MULTILINE)
    assert text.strip() == overview()


def test_version(capsys):
    assert printed(capsys, "--version") == f"lit-qrl {__version__}\n"


@pytest.mark.parametrize(
    ("word", "meant"), [("fitt", "fit"), ("audits", "audit"), ("quantise", "quantize"), ("validat", "validate")]
)
def test_an_unknown_command_is_one_paragraph_and_status_2(word, meant, capsys):
    assert status_of([word]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert text == f"lit-qrl: '{word}' is not a command of lit-qrl. Did you mean '{meant}'?"


def test_a_paragraph_is_wrapped_but_no_word_is_cut(capsys):
    path = "/a/very/long/path" * 12
    with pytest.raises(SystemExit):
        fail(f"The file {path} is missing. " + "word " * 40)
    lines = capsys.readouterr().err.splitlines()
    assert path in lines
    assert all(len(line) <= 110 for line in lines if line != path)


@pytest.mark.parametrize(
    ("words", "libraries"),
    [("--help", "torch"), ("quantize --help", "torch lightning"), ("--versions", "vllm transformers lightning")],
)
def test_what_a_command_does_not_need_is_not_imported(words, libraries):
    code = (
        "import atexit, os, sys; from lit_qrl.cli.main import main\n"
        f"atexit.register(lambda: os._exit(any(name in sys.modules for name in {libraries.split()})))\n"
        f"main({words.split()})"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_garbage_is_looked_for_again_after_the_imports():
    collections = []
    gc.callbacks.append(lambda phase, info: collections.append(phase))
    try:
        with uncollected(), uncollected():
            collections.clear()
            kept = [[] for _ in range(10_000)]
            assert not collections
        kept += [[] for _ in range(10_000)]
        assert collections
    finally:
        gc.callbacks.pop()


def test_a_bug_keeps_its_traceback(monkeypatch):
    def broken(args):
        raise RuntimeError("a bug")

    monkeypatch.setattr("lit_qrl.cli.main.run_training", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["fit"])


def test_the_working_directory_comes_last_and_its_modules_are_found(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise SystemExit('not this one')\n")
    (tmp_path / "my_own_rewards.py").write_text("ANSWER = 42\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert status_of(["nosuch"]) == 2
    assert sys.path[-1] == str(tmp_path)
    assert not PathFinder.find_spec("torch").origin.startswith(str(tmp_path))
    assert importlib.import_module("my_own_rewards").ANSWER == 42
    monkeypatch.delitem(sys.modules, "my_own_rewards")


def test_a_torch_of_the_working_directory_is_not_run(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('not this one')\n")
    for command in (["-P", "-c", "from lit_qrl.cli.main import main; main()"], ["-m", "lit_qrl.cli"]):
        done = subprocess.run(
            [sys.executable, *command, "--versions"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert (done.returncode, "not this one" in done.stderr) == (0, False), done.stderr


@pytest.mark.parametrize("words", [["--help"], ["--version"]])
def test_a_reader_that_has_enough_ends_what_is_printed_without_a_traceback(words):
    command = [sys.executable, "-m", "lit_qrl.cli", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        said = process.stderr.read()
    assert (process.returncode, said) == (-signal.SIGPIPE, b"")
