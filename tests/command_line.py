"""The parsers of the Trainer's commands, which take a second to build and a tenth to use."""

import inspect
from functools import cache
from importlib import import_module
from typing import Any

from lightning.pytorch.cli import LightningCLI
from peft import LoraConfig

from lit_qrl.cli.main import COMMANDS, main
from lit_qrl.cli.parser import CommandParser
from lit_qrl.cli.training import QRLCLI, classes_at

BUILT: dict[str, dict[str, Any]] = {}
"""What building the parser of a command has left in its `QRLCLI`."""


class _Parsed(Exception):
    pass


class _ParserOnly(QRLCLI):
    def parse_arguments(self, parser, args):
        raise _Parsed(parser)


@cache
def fit_parser():
    """Return the parser, one for the whole process."""
    try:
        _ParserOnly.run(["fit"])
    except _Parsed as caught:
        return caught.args[0]
    raise AssertionError("the command line has not parsed its arguments")


@cache
def options(command="fit"):
    """Return the names of a command's options, without dashes."""
    if command in COMMANDS:
        parser = CommandParser(getattr(import_module(f"lit_qrl.cli.{command}"), command))
    else:
        (action,) = (one for one in fit_parser()._actions if getattr(one, "_name_parser_map", None))
        parser = action._name_parser_map[command]
    return frozenset(name[2:] for one in parser._actions for name in one.option_strings if name.startswith("--"))


@cache
def parameters(kind):
    """Return the names of what a class may be given, its bases' where it hands them on."""
    found = set()
    for one in kind.__mro__:
        made = vars(one).get("__init__")
        found |= set(inspect.signature(made).parameters) if inspect.isfunction(made) else set()
    return found


def exists(option):
    """Return whether `fit` has an option of that name, or a class that may be chosen at its beginning."""
    parts = option.split(".")
    for end in range(len(parts), 0, -1):
        key, rest = ".".join(parts[:end]), [part for part in parts[end:] if part != "init_args"]
        if key in options():
            if not rest or rest[0] in ("class_path", "help"):
                return True
            if key == "model.policy" and rest[0] == "lora":
                return all(part in parameters(LoraConfig) for part in rest[1:])
            return any(rest[0] in parameters(kind) for kind in classes_at(key).values())
    return False


def status_of(words):
    """Return with which status `lit-qrl` ends."""
    try:
        main([*map(str, words)])
    except SystemExit as stop:
        return stop.code
    return 0


def nested(options):
    """Return the configuration that dotted keys make; what a class is given comes after it."""
    settings = {}
    for key, value in options.items():
        *above, last = key.split(".")
        place = settings
        for name in above:
            if not isinstance(inner := place.setdefault(name, {}), dict):
                inner = place[name] = {"class_path": inner, "init_args": {}}
            place = inner.get("init_args", inner)
        place[last] = value
    return settings


def build_once(monkeypatch):
    """Let `lit-qrl` take a parser that this process has built for the same command before."""
    parts = ("parser", "_subcommand_parsers", "_subcommand_method_arguments")

    def setup_parser(self, *arguments):
        command = self.arguments[0]
        if command not in BUILT:
            LightningCLI.setup_parser(self, *arguments)
            BUILT[command] = {name: getattr(self, name) for name in parts}
        vars(self).update(BUILT[command])

    monkeypatch.setattr(QRLCLI, "setup_parser", setup_parser)
