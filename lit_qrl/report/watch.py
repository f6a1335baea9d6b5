"""A page that is written again while its run goes on."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lit_qrl.report.run import ENDINGS
from lit_qrl.run.diary import EVENTS_FILE, METRICS_FILE, SAMPLES_FILE, read_jsonl
from lit_qrl.run.lock import holder_lives

WATCHED = (METRICS_FILE, EVENTS_FILE, SAMPLES_FILE, "publish.json", "histograms.json", "config.yaml")
"""Files whose change is a reason to write the page again."""
QUIET_SECONDS = 1800.0
"""A run of which it is not known whether its process lives has ended when nothing was written for so long."""


def watch(
    folders: Sequence[Path],
    write: Callable[[bool], Path],
    seconds: float,
    wait: Callable[[float], None] = time.sleep,
) -> Path:
    """Write a page when a file of its runs has changed, until the last run ends or at Ctrl-C; return its path.

    Args:
        folders: of the runs.
        write: makes the page; called with True while a run goes on, and at the end with False.
        seconds: between two looks at the files.
        wait: how those pass.
    """
    seen = None
    try:
        while any(goes_on(folder) for folder in folders):
            now = [_stamp(folder / name) for folder in folders for name in WATCHED]
            if now != seen:
                write(True)
                seen = now
            wait(seconds)
    except KeyboardInterrupt:
        pass
    return write(False)


def goes_on(folder: Path, now: Callable[[], float] = time.time) -> bool:
    """Return whether a run is under way: its process holds its folder, or else its diary says so and files change."""
    lives = holder_lives(folder)
    if lives is not None:
        return lives
    last = next((one for one in reversed(read_jsonl(folder / EVENTS_FILE)) if one.get("kind") in _SAYS), {})
    if last.get("kind") not in ("start", "resume"):
        return False
    newest = max(_stamp(folder / name)[0] for name in WATCHED) / 1e9
    return now() - newest < QUIET_SECONDS


_SAYS = (*ENDINGS, "start", "resume")


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size
