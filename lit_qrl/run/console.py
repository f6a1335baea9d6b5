"""What is said on the screen during a run, and what goes into a file of its folder: libraries, phases, advice."""

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stderr, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

from lit_qrl.run.folder import LOG_FILE

COMPILERS = ("flashinfer", "deep_gemm", "triton", "torch._inductor", "torch._dynamo")
LIBRARIES = ("vllm", *COMPILERS, "torchao", "transformers", "py.warnings")
"""Loggers of the engine, of what compiles for it, and of Python's warnings."""


@contextmanager
def kept_from_the_screen(folder: Path | None) -> Iterator[None]:
    """Send what libraries log and warn of to `<folder>/libraries.log`; on the screen stand errors, each once.

    Warnings of files in the working directory, which are the user's own, stay on the screen. What this library logs for
    its maintainers goes to the file too. vLLM sets up its own logging when it is imported, unless it is told not to,
    which this does. The file is made with its first line. `VLLM_LOGGING_LEVEL`, INFO by default, sets how much is
    written.

    Args:
        folder: of the run; None writes no file.
    """
    level = os.environ.get("VLLM_LOGGING_LEVEL", "INFO")
    settings = {"VLLM_CONFIGURE_LOGGING": "0", "VLLM_LOGGING_LEVEL": level}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    file = logging.NullHandler() if folder is None else _File(folder / LOG_FILE, encoding="utf-8", delay=True)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    screen = _Screen()
    loggers = _loggers()
    kept = [(one, one.level, one.propagate, one.handlers[:]) for one in loggers]
    for one in loggers:
        one.handlers[:], one.propagate = [file, screen], False
        if not one.name.startswith("torch."):  # torch's have levels, and handlers, of their own
            one.setLevel(level)
    ours, shows = logging.getLogger("lit_qrl"), warnings.showwarning
    ours.addHandler(file)
    warnings.showwarning = _to_the_file(shows)
    try:
        yield
    finally:
        warnings.showwarning = shows
        ours.removeHandler(file)
        for one, level_before, propagate, handlers in kept:
            one.handlers[:], one.propagate = handlers, propagate
            one.setLevel(level_before)
        with suppress(OSError):  # of a full disk
            file.close()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _loggers() -> list[logging.Logger]:
    """Return the libraries' loggers, and those below torch's that torch has given a handler."""
    made = [name for name in logging.root.manager.loggerDict if name.startswith(COMPILERS) and name not in LIBRARIES]
    below = [one for one in map(logging.getLogger, made) if one.handlers]
    return [*map(logging.getLogger, LIBRARIES), *below]


def _to_the_file(shows: Callable[..., None]) -> Callable[..., None]:
    """Return what logs a library's warning, and shows one of the user's own code."""
    here = Path.cwd()

    def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *more: Any) -> None:
        path = Path(filename).absolute()
        own = path.is_relative_to(here) and not {"site-packages", "dist-packages", "lit_qrl"} & set(path.parts)
        if own:
            shows(message, category, filename, lineno, *more)
        else:
            logging.getLogger("py.warnings").warning("%s:%d: %s: %s", filename, lineno, category.__name__, message)

    return show


def without_bars() -> AbstractContextManager[Any]:
    """Keep progress bars of a library that has no option for it from the present stderr."""
    return redirect_stderr(_WithoutBars(sys.stderr))


class _WithoutBars:
    """Passes text on, but for a bar: what begins with a carriage return, and the end of its line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._in_bar = stream, False

    def write(self, text: str) -> int:
        bar = text.startswith("\r") or (self._in_bar and text == "\n")
        self._in_bar = bar and text != "\n"
        return len(text) if bar else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Lasting(TextIOWrapper):
    """Throws away what cannot be written."""

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError:
            self._leave()
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            self._leave()

    def _leave(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)


def outlast_readers() -> None:
    """Let a run go on whose screen is gone: a pipe without a reader, a closed terminal, a log on a full disk."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            lines = stream.line_buffering
            setattr(sys, name, _Lasting(stream.buffer, stream.encoding, stream.errors, line_buffering=lines))


class _File(logging.FileHandler):
    """Makes its folder with its first line: a command that does not train may have none yet."""

    def _open(self) -> TextIOWrapper:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return super()._open()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Leave the line out where the disk is full: what a run cannot do without says so."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _Screen(logging.StreamHandler):
    """Writes an error to the present stderr, which a progress bar may have taken over, once."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()
        self.setLevel(logging.ERROR)
        self.addFilter(self._new)

    @property
    def stream(self) -> TextIO:
        """Where errors go now."""
        return sys.stderr

    @stream.setter
    def stream(self, stream: TextIO) -> None:
        pass

    def format(self, record: logging.LogRecord) -> str:
        """Return the library's name and the first line; the rest, such as a traceback, is in the file."""
        return f"{record.name.partition('.')[0]}: {record.getMessage().strip().partition(chr(10))[0]}"

    def _new(self, record: logging.LogRecord) -> bool:
        said = f"{record.name}: {record.getMessage()}"
        new = said not in self._seen
        self._seen.add(said)
        return new


log = logging.getLogger(__name__)

BEGAN = time.monotonic()
"""When this was first imported, which a command does before it imports anything large."""
SHOWN_FROM = 1.0
"""Seconds from which a phase has a line."""


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Say how long what stands within took, where that is a second or more.

    Args:
        name: of the phase, as its line begins.
    """
    began = time.monotonic()
    yield
    if (seconds := time.monotonic() - began) >= SHOWN_FROM:
        log.info("%s: %.1f s", name, seconds)


def _tells(record: logging.LogRecord) -> bool:
    """Return whether a message says more than advice: a fault, or that a limit of time ends the run."""
    return record.levelno >= logging.WARNING or "Signaling Trainer to stop" in record.getMessage()


def quiet() -> None:
    """Silence that advice, and let what this library says be seen."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_tells)
    for name in ("lightning.fabric.utilities.seed", "lightning.pytorch.accelerators.cuda"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for pattern in (
        "LightningCLI's args parameter.*",
        ".*does not have many workers.*",
        ".*smaller than the logging interval.*",
        ".*`training_step` returned",
        ".*`IterableDataset` has `__len__` defined.*",
        r".*module\(s\) in eval mode.*",  # a policy is trained without dropout
        ".*LeafSpec.*is deprecated.*",  # Lightning's own use of torch
        "Starting from v1.9.0, `tensorboardX`",  # `metrics.csv` is written whatever other logger there is
    ):
        warnings.filterwarnings("ignore", pattern)
    if "transformers" in sys.modules:  # a command that only prints has not loaded it
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
    ours = logging.getLogger("lit_qrl")
    if not ours.handlers:
        screen = logging.StreamHandler()
        screen.setLevel(logging.INFO)
        ours.addHandler(screen)
    ours.setLevel(logging.DEBUG)  # what is for nobody but a maintainer goes to the run's file
