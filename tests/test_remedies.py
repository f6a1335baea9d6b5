"""What errors tell users to type exists: options, keys, commands and files in the remedies of the source."""

import ast
import re
from pathlib import Path

import pytest

from lit_qrl.cli.main import COMMANDS, TRAINING
from lit_qrl.cli.training import classes_at
from tests.command_line import exists, options, parameters

ROOT = Path(__file__).parent.parent
GROUPS = sorted({name.split(".")[0] for name in options() if "." in name})
HOLE = "\0"
"""Stands for what an f-string puts in."""
KEY = re.compile(rf"(?<![\w./-])((?:{'|'.join(GROUPS)})(?:\.[a-z_]\w*)+)(?!\w*[(/{HOLE}])")
OPTION = re.compile(rf"(?<![\w-])--([a-z]\w*(?:\.\w+)*)(?![\w.{HOLE}-])")
SETTING = re.compile(r"(?:\b[Ss]et|\b[Rr]aise|\b[Ll]ower|\b[Ss]witch|,|or) `?([a-z]+(?:_[a-z]+)+)`?(?= to\b|:)")
COMMAND = re.compile(r"\blit-qrl ([a-z]+)")
FILE = re.compile(r"\b((?:configs|docs|examples)/[\w/.-]+\.\w+)")


def text_of(node):
    """Return the words of an expression that is a text, as far as they stand in the source."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(HOLE if isinstance(part, ast.FormattedValue) else text_of(part) for part in node.values)
    return " ".join(text_of(child) for child in ast.iter_child_nodes(node))


def remedies(source):
    """Yield line and words of each remedy of a file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword) and node.arg == "remedy":
            yield node.value.lineno, text_of(node.value)
        elif isinstance(node, ast.Assign) and "remedy" in ast.unparse(node.targets[0]).lower():
            yield node.lineno, text_of(node.value)


def known_settings():
    """Return the last parts of all options, and what any class that may be named takes."""
    commands = [name for command in COMMANDS for name in options(command)]
    taken = set().union(*(parameters(kind) for kind in classes_at().values()))
    return {name.rpartition(".")[2] for name in (*options(), *commands)} | taken


def wrong(text):
    """Return what a remedy names and is not there."""
    commands = {"help", "versions"}.union(*(options(command) for command in COMMANDS))
    found = [key for key in KEY.findall(text) if not exists(key)]
    found += [f"--{name}" for name in OPTION.findall(text) if name not in commands and not exists(name)]
    found += [name for name in SETTING.findall(text) if name not in known_settings()]
    found += [f"lit-qrl {name}" for name in COMMAND.findall(text) if name not in {*COMMANDS, *TRAINING}]
    return found + [name for name in FILE.findall(text) if not (ROOT / name).exists()]


def test_what_remedies_name_exists():
    files = sorted((ROOT / "lit_qrl").rglob("*.py"))
    told = [(file.name, *one) for file in files for one in remedies(file.read_text(encoding="utf-8"))]
    assert len(told) > 300
    assert not [(name, line, found) for name, line, text in told if (found := wrong(text))]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Set data.greedy to true.", ["data.greedy"]),
        ("Set model.objective.clip to 0.2, or data.group_size.", ["model.objective.clip"]),
        ("Set evaluation_greed to true.", ["evaluation_greed"]),
        ("Give --evaluation_greedy, or --seed_everything 1.", ["--evaluation_greedy"]),
        ("Run lit-qrl trainn, or lit-qrl audit.", ["lit-qrl trainn"]),
        ("Add configs/correction/tiss.yaml.", ["configs/correction/tiss.yaml"]),
        ("Set data.engine.gpu_memory_utilization, or model.policy.lora.target_modules.", []),
    ],
)
def test_a_name_that_is_not_there_is_found(text, found):
    assert wrong(text) == found
