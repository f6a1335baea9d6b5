"""`lit-qrl report`: the page of one run folder, or of several side by side."""

from collections.abc import Sequence
from pathlib import Path

from lit_qrl.errors import ConfigError
from lit_qrl.run.event_log import METRICS_FILE
from lit_qrl.run.folder import is_run, meant


def report(runs: Sequence[Path], out: Path | None = None, watch: bool = False, every: float = 10.0) -> Path:
    """Make the HTML report of a run folder, also while it is running. Several folders are compared.

    Runs that differ in their seed only become one line with a band around it. With --watch the page is written again
    when the run's files change, and loads itself again in the browser, until the run ends or at Ctrl-C.

    Examples:
      lit-qrl report runs/quickstart/1
      lit-qrl report runs/quickstart/1 runs/quickstart/2              in runs/quickstart/comparison
      lit-qrl report runs/quickstart/1 runs/mine/1 --out runs/formats
      lit-qrl report --watch runs/quickstart/1

    Args:
        runs: a run folder, such as runs/quickstart/1.
        out: folder to write into (default: RUN/report for one run, comparison beside the first RUN for several).
        watch: write it again and again while the run goes on.
        every: seconds between two looks at a watched run's files, and between two loads of the page.

    Returns:
        the page, which is also printed.

    Raises:
        ConfigError: for a folder that is no run folder, a place that cannot be written, or no time between two looks.
    """
    from lit_qrl.report import render, render_comparison
    from lit_qrl.report.live import watch as watching

    for run in runs:
        _check(run)
    if not 0.5 <= every <= 86400:
        raise ConfigError("--every is out of range.", expected="0.5 to 86400 seconds", given=every)

    def write(live: bool) -> Path:
        seconds = every if live else None
        if len(runs) == 1:
            page = render(runs[0], out, seconds)
        else:
            page = render_comparison(runs, out or runs[0].parent / "comparison", seconds)
        if live and not shown:
            shown.append(page)
            print(f"{page} (written again while the run goes on; Ctrl-C ends this, not the run)", flush=True)
        return page

    shown: list[Path] = []
    try:
        index = watching(runs, write, every) if watch else write(False)
    except OSError as error:
        raise ConfigError(
            "The report cannot be written.",
            given=f"{error.filename or out} ({error.strerror or error})",
            remedy="Name another folder with --out.",
        ) from error
    print(index)
    return index


def _check(run: Path) -> None:
    if not is_run(run):
        raise ConfigError(
            "This is not a run folder.", expected=f"a folder with {METRICS_FILE}", given=run, remedy=meant(run)
        )
