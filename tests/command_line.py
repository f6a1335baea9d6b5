"""The parsers of the Trainer's commands, which take a second to build and a tenth to use."""

from functools import cache
from typing import Any

from lightning.pytorch.cli import LightningCLI

from lit_qrl.cli.training import QRLCLI

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
