"""The parser of `lit-qrl fit`, which takes a second to build and a tenth to use."""

from functools import cache

from lit_qrl.cli.training import QRLCLI


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
