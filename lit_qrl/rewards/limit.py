"""A limit for calls of code that is not ours: such a call comes back, is interrupted, or ends the process."""

import faulthandler
import signal
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


class _Late(BaseException):
    """Raised within a call that is late; no `except Exception` of the call's own takes it for a fault of its own."""


def call(function: Callable[..., Any], *arguments: Any, seconds: float | None) -> Any:
    """Return what a function returns.

    In the main thread a late call is interrupted by an alarm, which also ends what loops in Python, sleeps, waits for a
    socket or matches a regular expression; in another thread it goes on, abandoned. Native code that holds the
    interpreter hears neither: `GRACE` seconds later `faulthandler`, whose clock needs no interpreter, prints the lines
    at which all threads stand and ends the process with status 1.

    Args:
        function: what is called.
        arguments: its arguments.
        seconds: the limit; None has none.

    Raises:
        TimeoutError: the call was late.

    >>> call(pow, 2, 10, seconds=60)
    1024
    """
    if seconds is None:
        return function(*arguments)
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=sys.__stderr__)
    try:
        if threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer"):
            with _alarm(seconds):
                return function(*arguments)
        return _in_thread(function, arguments, seconds)
    finally:
        faulthandler.cancel_dump_traceback_later()


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
