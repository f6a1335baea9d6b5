"""Tab completion: one script that knows every command and its options, made by shtab from the parsers."""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from jsonargparse import _completions
from lightning.pytorch.cli import LightningCLI

from lit_qrl.cli.parser import CommandParser
from lit_qrl.cli.training import QRLCLI
from lit_qrl.errors import ConfigError, nearest

SHELLS = ("bash", "zsh")
"""Those for which shtab completes the options of subcommands."""


class _AllParsers(QRLCLI):
    """Builds the parsers of all commands, and parses nothing."""

    others: Mapping[str, str] = {}

    def subcommands(self) -> dict[str, set[str]]:
        return LightningCLI.subcommands()

    def _add_subcommands(self, parser: Any, **kwargs: Any) -> None:
        super()._add_subcommands(parser, **kwargs)
        for name, what in self.others.items():
            function = getattr(importlib.import_module(f"lit_qrl.cli.{name}"), name)
            parser._subcommands_action.add_subcommand(name, CommandParser(function), help=what)

    def parse_arguments(self, parser: Any, args: Any) -> None:
        raise _BuiltError(parser)


class _BuiltError(Exception):
    """Carries the parser out of the constructor."""


@contextmanager
def _no_class_within_itself() -> Iterator[None]:
    """Complete the options of a class once: a task may be a mixture of tasks, without end."""
    original, above = _completions.add_subactions_and_get_subclass_choices, []

    def once(typehint: Any, prefix: str | None, *args: Any, **kwargs: Any) -> list[str]:
        above.append(typehint)
        try:
            return original(typehint, None if typehint in above[:-1] else prefix, *args, **kwargs)
        finally:
            above.pop()

    _completions.add_subactions_and_get_subclass_choices = once
    try:
        yield
    finally:
        _completions.add_subactions_and_get_subclass_choices = original


def completion(shell: str, commands: Mapping[str, str]) -> str:
    """Return the script that completes `lit-qrl` in a shell.

    Args:
        shell: `bash` or `zsh`.
        commands: those that are functions, and what each does.

    Raises:
        ConfigError: for another shell, or without shtab.
    """
    if shell not in SHELLS:
        raise ConfigError(
            "--print_shtab writes for a shell.",
            expected=", ".join(SHELLS),
            given=shell or None,
            remedy=nearest(shell, SHELLS) if shell else "Name one.",
        )
    if find_spec("shtab") is None:
        raise ConfigError("Tab completion needs shtab.", remedy="pip install shtab")
    _AllParsers.others = commands
    try:
        _AllParsers.run(["fit"])
    except _BuiltError as built:
        parser: Any = built.args[0]
        parser.prog = "lit-qrl"
        with _no_class_within_itself():
            return parser.get_completion_script(f"shtab-{shell}")
    raise AssertionError("no parser was built")
