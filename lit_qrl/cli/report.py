"""`lit-qrl report`: the page of one run folder, or of several side by side."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lit_qrl.cli.parser import CommandParser
from lit_qrl.cli.runs import meant
from lit_qrl.errors import ConfigError
from lit_qrl.run.diary import METRICS_FILE
from lit_qrl.run.folder import is_run

_EXAMPLES = """
examples:
  lit-qrl report runs/quickstart/1
  lit-qrl report runs/quickstart/1 runs/quickstart/2              in runs/quickstart/comparison
  lit-qrl report runs/quickstart/1 runs/mine/1 --out runs/formats
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
        help="folder to write into (default: RUN/report for one run, comparison beside the first RUN for several)",
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
            index = render_comparison(arguments.runs, arguments.out or arguments.runs[0].parent / "comparison")
    except OSError as error:
        raise ConfigError(
            "The report cannot be written.",
            given=f"{error.filename or arguments.out} ({error.strerror or error})",
            remedy="Name another folder with --out.",
        ) from error
    print(index)


def _check(run: Path) -> None:
    if not is_run(run):
        raise ConfigError(
            "This is not a run folder.", expected=f"a folder with {METRICS_FILE}", given=run, remedy=meant(run)
        )
