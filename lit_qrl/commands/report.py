"""`lit-qrl report`: the page of one run folder, or of several side by side."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lit_qrl.commands.parser import CommandParser
from lit_qrl.errors import ConfigError, nearest

_EXAMPLES = """
examples:
  lit-qrl report runs/quickstart/1
  lit-qrl report runs/quickstart/1 runs/quickstart/2 --out comparison
"""


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = CommandParser(
        "report",
        description="Make the HTML report of a run folder, also while it is running. Several folders are compared.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run folder, such as runs/quickstart/1")
    parser.add_argument(
        "--out",
        type=Path,
        help="folder to write into (default: RUN/report for one run, ./comparison for several)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Make the report and print where it is.

    Raises:
        ConfigError: for a folder that is no run folder, or a place that cannot be written.
    """
    from lit_qrl.report import render, render_comparison

    arguments = parser().parse_args(argv)
    for run in arguments.runs:
        _check(run)
    try:
        if len(arguments.runs) == 1:
            index = render(arguments.runs[0], arguments.out)
        else:
            index = render_comparison(arguments.runs, arguments.out or Path("comparison"))
    except OSError as error:
        raise ConfigError(
            "The report cannot be written.",
            given=f"{error.filename or arguments.out} ({error.strerror or error})",
            remedy="Name another folder with --out.",
        ) from error
    print(index)


def _check(run: Path) -> None:
    known = ("metrics.csv", "events.jsonl", "config.yaml", "samples.jsonl")
    if any((run / name).is_file() for name in known):
        return
    # `runs/quickstart` holds runs by number; naming the newest is more help than saying that it is none.
    inner = [str(path.parent) for path in sorted(run.glob("*/*")) if path.name in known] if run.is_dir() else []
    beside = [path.name for path in run.parent.iterdir() if path.is_dir()] if run.parent.is_dir() else []
    remedy = f"Did you mean {inner[-1]}?" if inner else nearest(run.name, sorted(beside)) if beside else ""
    raise ConfigError("This is not a run folder.", expected=f"a folder with {known[0]}", given=run, remedy=remedy)
