"""A page of a run that goes on, made by a process of its own."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

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
