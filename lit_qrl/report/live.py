"""A page of a run that goes on: made by a process of its own, and written again when files change."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from lit_qrl.report.run import ENDINGS
from lit_qrl.run.event_log import EVENTS_FILE, METRICS_FILE, SAMPLES_FILE, read_jsonl
from lit_qrl.run.folder import holder_lives

CODE = "import sys; from lit_qrl.report import render; render(sys.argv[1])"


class PageApart:
    """Makes the report of a run folder beside the run, one at a time; it holds no GPU, and one thread of the host."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self, folder: str | os.PathLike) -> bool:
        """Start to make the page, and return whether the one before it was made; while that goes on, nothing starts.

        Args:
            folder: of the run.
        """
        if self._process is not None and self._process.poll() is None:
            return True
        made = self._process is None or self._process.returncode == 0
        paths = os.pathsep.join(str(Path(path).absolute()) for path in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-c", CODE, str(folder)],
            env={**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the run
        )
        return made

    def wait(self, seconds: float) -> None:
        """Return when the page that is being made is there, or after so many seconds."""
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)

    def end(self) -> None:
        """Stop a page that is being made: the one of the run's end comes instead."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


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
    """Return whether a run is under way: its process holds its folder, or its event log says so and files change."""
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
