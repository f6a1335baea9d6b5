"""Every snippet of the pages is run: YAML on top of the quickstart, Python, and the options of commands.

A snippet behind `<!-- not run: why -->` is left out. A Python snippet whose first line is `# name.py` is a file of that
name for those after it on its page; the others share their names, so that one goes on where the one before it ended.
"""

import importlib
import itertools
import json
import os
import re
import shlex
import stat
import subprocess
import sys
import tomllib
import unicodedata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from lit_qrl.cli.config_files import expanded
from lit_qrl.cli.main import COMMANDS, TRAINING
from lit_qrl.cli.parser import CommandParser
from lit_qrl.errors import ConfigError
from tests.command_line import fit_parser

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/studies/*.md"), *ROOT.glob("examples/*/*.md")]
)
BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<why>.+) -->\n+)?```(?P<kind>\w*)\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL
)
SHELL = ("bash", "sh", "shell", "console")
KNOWN = {"yaml", "python", "json", "text", *SHELL}
MODULE = re.compile(r"# ((\w+)\.py)\n")


class Snippet(NamedTuple):
    page: Path
    line: int
    kind: str
    text: str
    why: str | None

    @property
    def place(self):
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def snippets(page):
    text = page.read_text()
    return [
        Snippet(page, text.count("\n", 0, found.start("text")), found["kind"], found["text"], found["why"])
        for found in BLOCK.finditer(text)
    ]


ALL = [snippet for page in PAGES for snippet in snippets(page)]


def of(*kinds):
    found = [one for one in ALL if one.kind in kinds and one.why is None]
    return pytest.mark.parametrize("snippet", found, ids=[one.place for one in found])


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with the checkout's configs and models, where modules of snippets are found and forgotten."""
    for name in ("configs", "models", "examples", "benchmarks", "docs", "Makefile"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    importlib.invalidate_caches()
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def write_modules(page, folder):
    """Write the files that a page shows as Python and YAML under their names."""
    for one in snippets(page):
        named = MODULE.match(one.text) if one.kind == "python" else None
        if named:
            (folder / named[1]).write_text(one.text)


def parse(*args):
    return fit_parser().parse_args(expanded(["fit", *args]), _skip_validation=False).fit


def accept(read, text):
    """Read a configuration; one that needs a library that is missing must say how to install it."""
    if find_spec("bitsandbytes") is None and "adamw8bit" in text.lower():
        with pytest.raises(ConfigError, match=r"pip install 'lit-qrl\[bnb\]'"):
            read()
    else:
        read()


def test_every_block_says_what_it_is():
    assert len(PAGES) > 20
    assert len(ALL) > 50
    for one in ALL:
        assert one.kind in KNOWN, one.place
        assert one.why is None or len(one.why) > 10, one.place


@of("json")
def test_json(snippet):
    for line in snippet.text.splitlines():
        json.loads(line)


@of("yaml")
def test_yaml(snippet, here):
    write_modules(snippet.page, here)
    (here / "snippet.yaml").write_text(snippet.text)
    known = "seed_everything model data trainer publisher guard monitor report checkpoint config"
    assert set(yaml.safe_load(snippet.text)) <= {*known.split()}
    accept(lambda: parse(f"--config={QUICKSTART}", "--config=snippet.yaml"), snippet.text)


PROGRAMS = sorted({one.page for one in ALL if one.kind == "python"})


@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: str(page.relative_to(ROOT)))
def test_python(page, here, monkeypatch, capsys):
    monkeypatch.setattr("lit_qrl.callbacks.report.render", lambda folder: None)  # drawing takes seconds
    write_modules(page, here)
    shared = {"__name__": "__main__"}
    for one in snippets(page):
        if one.kind != "python" or one.why:
            continue
        named = MODULE.match(one.text)
        if named:
            importlib.import_module(named[2])
        else:
            exec(compile(one.text.replace("max_epochs=20", "max_epochs=1"), one.place, "exec"), shared)


def words(text):
    """Yield the commands of a shell snippet as words, without what is assigned before them and piped behind."""
    joined = text.replace("\\\n", " ")
    for line in joined.splitlines():
        try:
            found = shlex.split(line.strip(), comments=True)
        except ValueError:
            continue
        while found and re.fullmatch(r"\w+=.*", found[0]):
            name, _, value = found.pop(0).partition("=")
            if name == "PYTHONPATH" and str(ROOT / value) not in sys.path:
                sys.path.append(str(ROOT / value))
        if found[:1] == ["srun"]:
            found.pop(0)
        if found:
            yield list(itertools.takewhile(lambda word: word not in (">", "|", "&&", ";", ">>"), found))


def check_training(given):
    """Parse the options of a training; of a file that only a run makes, the rest."""
    given = [word for word in given if word not in ("--print_config", "--help")]
    for at in reversed(range(len(given))):
        if given[at] == "--config" and not Path(given[at + 1]).exists():
            assert re.match(r"(runs/|\w+\.yaml$|…)", given[at + 1]), f"{given[at + 1]} is not in the checkout"
            del given[at : at + 2]
    if not any(word.startswith("--config") for word in given):
        given = [f"--config={QUICKSTART}", *given]
    if any(word.endswith(".help") for word in given):  # prints the options of a class
        with pytest.raises(SystemExit) as ended:
            parse(*given)
        assert ended.value.code == 0
        return
    accept(lambda: parse(*given), " ".join(given))


def check_command(given, page, folder):
    """Assert that a command of a page exists, and that it takes its options."""
    program, *rest = given
    if program == "lit-qrl":
        write_modules(page, folder)
        if rest[0] in ("quickstart", *TRAINING):
            check_training(rest[1:])
        elif rest[0] in COMMANDS:
            function = getattr(importlib.import_module(f"lit_qrl.cli.{rest[0]}"), rest[0])
            CommandParser(function).parse_args(rest[1:])
        else:
            assert rest[0] in ("--help", "--version", "--versions"), rest
    elif program == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), rest
    elif program == "python" and rest[0] != "-m":
        assert (ROOT / rest[0]).is_file(), rest
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for name in re.findall(r"lit-qrl\[(\w+)\]", " ".join(rest)):
            assert name in extras, rest


@of(*SHELL)
def test_commands(snippet, here):
    found = list(words(snippet.text))
    assert found
    for given in found:
        check_command(given, snippet.page, here)


INLINE = [
    (page, text)
    for page in PAGES
    if page.name not in ("models.md", "CHANGELOG.md")  # every command of that page is run by the families' tests
    for text in re.findall(r"`((?:lit-qrl|make|python) [^`]+)`", page.read_text())
    if "…" not in text and "COMMAND" not in text
]


@pytest.mark.parametrize(("page", "text"), INLINE, ids=[f"{page.name}: {text[:60]}" for page, text in INLINE])
def test_commands_within_the_text(page, text, here):
    for given in words(" ".join(text.split())):
        if (
            given != ["lit-qrl"]
            and len(given) > 1
            and not (given[0] == "lit-qrl" and given[1:] in ([n] for n in COMMANDS))
        ):
            check_command(given, page, here)


def test_a_wrong_snippet_is_found(here):
    for wrong in (
        "fit --data.group_sise 4",
        "fit --data.task.class_path Countdwn",
        "report --outt x",
        "fti",
        "fit --config no/such.yaml",
    ):
        with pytest.raises((ConfigError, AssertionError)):
            check_command(["lit-qrl", *wrong.split()], ROOT / "README.md", here)
    with pytest.raises(AssertionError):
        check_command(["make", "quickstrat"], ROOT / "README.md", here)


# ----------------------------------------------------------------------------------------------------------- links


def slug(heading):
    """Return the anchor that mkdocs and GitHub give a heading."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
    text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


def anchors(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target


def pages_of(*wanted):
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    entries = [entry for one in nav for entry in one.items()]
    kinds = {kind: [file for page in there for file in page.values()] for kind, there in entries if kind != "Start"}
    kinds["Tutorials"].append("index.md")
    return [file for kind in wanted or kinds for file in kinds[kind]]


def test_every_page_is_in_the_navigation():
    docs = ROOT / "docs"
    assert sorted(pages_of()) == sorted(
        str(path.relative_to(docs)) for path in [*docs.glob("*.md"), *docs.glob("studies/*.md")]
    )
    assert all(file.startswith("studies/") for file in pages_of("Studies"))


def test_guides_are_short_and_few():
    by_hand = [file for file in pages_of("Guides", "Reference") if file not in ("keys.md", "models.md")]
    assert len(by_hand) <= 18
    for file in pages_of("Guides"):
        assert len((ROOT / "docs" / file).read_text().splitlines()) <= 200, file


@pytest.mark.parametrize("file", ["../README.md", *pages_of("Tutorials", "Guides", "Reference")])
def test_dates_and_hosts_stand_in_studies(file):
    """A figure's day and machine are told once, in the study that says how it was measured."""
    text = (ROOT / "docs" / file).read_text()
    assert re.findall(r"20\d\d-\d\d-\d\d|AMD EPYC", text) == []


# --------------------------------------------------------------------------------------------------- a job on a cluster

JOBS = [one for one in snippets(ROOT / "docs" / "runs.md") if "status=$?" in one.text]


@pytest.mark.parametrize("status", [0, 2, 70, 75, 137, 143])
def test_the_job_goes_on_after_a_preemption_and_ends_otherwise(status, tmp_path):
    slurm, loop = JOBS
    stand_ins = {
        "srun": f"exit {status}",
        "scontrol": 'echo "$@" >> again',
        "lit-qrl": f"test -e again && exit 0; exit {status}",
        "sleep": "touch again",
    }
    for name, does in stand_ins.items():
        file = tmp_path / name
        file.write_text(f"#!/bin/sh\n{does}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    goes_on = status in (75, 143)

    def run(script):
        return subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, timeout=30).returncode

    assert run(slurm.text) == status
    assert (tmp_path / "again").exists() is (goes_on or status == 137)
    (tmp_path / "again").unlink(missing_ok=True)
    assert run(loop.text) == (0 if goes_on else status)
