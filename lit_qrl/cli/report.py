"""`lit-qrl report`: the page of one run folder, or of several side by side."""

from collections.abc import Sequence
from pathlib import Path

from lit_qrl.errors import ConfigError
from lit_qrl.run.event_log import METRICS_FILE
from lit_qrl.run.folder import is_run, meant


def report(runs: Sequence[Path], out: Path | None = None) -> Path:
    """Make the HTML report of a run folder, also while it is running. Several folders are compared.

    Runs that differ only in seed are drawn as one line with a band.

    Examples:
      lit-qrl report runs/quickstart/1
      lit-qrl report runs/quickstart/1 runs/quickstart/2              in runs/quickstart/comparison
      lit-qrl report runs/quickstart/1 runs/mine/1 --out runs/formats

    Args:
        runs: a run folder, such as runs/quickstart/1.
        out: folder to write into (default: RUN/report for one run, comparison beside the first RUN for several).

    Returns:
        the page, which is also printed.

    Raises:
        ConfigError: for a folder that is no run folder, or a place that cannot be written.
    """
    from lit_qrl.report import render, render_comparison

    for run in runs:
        if not is_run(run):
            raise ConfigError(
                "This is not a run folder.", expected=f"a folder with {METRICS_FILE}", given=run, remedy=meant(run)
            )
    beside = out or runs[0].parent / "comparison"
    try:
        index = render(runs[0], out) if len(runs) == 1 else render_comparison(runs, beside)
    except OSError as error:
        raise ConfigError(
            "The report cannot be written.",
            given=f"{error.filename or out} ({error.strerror or error})",
            remedy="Name another folder with --out.",
        ) from error
    print(index)
    return index
