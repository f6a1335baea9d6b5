"""A limit for calls of code that is not ours: such a call comes back, is interrupted, or ends the process."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

GRACE = 30.0
"""Seconds between the interruption of a call and the end of a process in which nothing came of it."""
REPEAT = 1.0
"""Seconds until a call is interrupted again that went on all the same."""
# Native code may hold the interpreter, so that no thread of this process could end it: another process does.
_WATCH = """
import os, select, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
parent, limit, sentence, rest = os.getppid(), None, "", b""
while True:
    if not select.select([0], [], [], limit)[0]:
        if os.getppid() == parent:
            sys.stderr.write("\\n" + sentence + "\\n")
            sys.stderr.flush()
            os.kill(parent, signal.SIGKILL)
        break
    chunk = os.read(0, 65536)
    if not chunk:
        break
    *lines, rest = (rest + chunk).split(b"\\n")
    if lines:
        seconds, _, sentence = lines[-1].decode("utf-8", "replace").partition(" ")
        limit = float(seconds) if seconds else None
"""


class _Late(BaseException):
    """Raised within a call that is late; no `except Exception` of the call's own takes it for a fault of its own."""


class _Watch:
    """A process that kills this one when a call neither returns nor can be interrupted."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def arm(self, seconds: float, sentence: str) -> None:
        """Start the clock."""
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            command = [sys.executable, "-I", "-S", "-c", _WATCH]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0)
            self._owner = os.getpid()
        self._send(f"{seconds:g} {' '.join(sentence.split())}")

    def disarm(self) -> None:
        """Stop the clock."""
        self._send("")

    def _send(self, line: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
        except OSError:  # it is gone, and the next call has another
            self._process = None


_watch = _Watch()


def call(function: Callable[..., Any], *arguments: Any, seconds: float | None, what: str) -> Any:
    """Return what a function returns.

    In the main thread a late call is interrupted by an alarm, which also ends what loops in Python, sleeps, waits for a
    socket or matches a regular expression; in another thread it goes on, abandoned. Native code that holds the
    interpreter hears neither: the process is killed then, after one sentence, `GRACE` seconds later.

    Args:
        function: what is called.
        arguments: its arguments.
        seconds: the limit; None has none.
        what: names the call in that sentence.

    Raises:
        TimeoutError: the call was late.

    >>> call(pow, 2, 10, seconds=60, what="pow")
    1024
    """
    if seconds is None:
        return function(*arguments)
    sentence = (
        f"lit-qrl: {what} did not return within {seconds:g} s and cannot be interrupted, since it is in native code. "
        "The process ends here; correct it, or start it in a process of its own, and go on with --ckpt_path last."
    )
    _watch.arm(seconds + GRACE, sentence)
    try:
        if threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer"):
            with _alarm(seconds):
                return function(*arguments)
        return _in_thread(function, arguments, seconds)
    finally:
        _watch.disarm()


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    is_over = False

    def interrupt(number: int, frame: Any) -> None:
        if not is_over:
            raise _Late

    started, previous = time.monotonic(), signal.signal(signal.SIGALRM, interrupt)
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, seconds, REPEAT)
    try:
        try:
            yield
        finally:
            is_over = True
    except _Late:
        raise TimeoutError(f"not done within {seconds:g} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if previous is None else previous)
        if remaining:  # somebody else's clock
            signal.setitimer(signal.ITIMER_REAL, max(remaining - (time.monotonic() - started), 1e-3), interval)


def _in_thread(function: Callable[..., Any], arguments: tuple[Any, ...], seconds: float) -> Any:
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((True, function(*arguments)))
        except BaseException as error:
            outcome.append((False, error))

    thread = threading.Thread(target=run, name="reward", daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(f"not done within {seconds:g} s")
    succeeded, result = outcome[0]
    if succeeded:
        return result
    raise result
