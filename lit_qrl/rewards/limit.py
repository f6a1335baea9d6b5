"""Calls of code that is not ours in this process: how long they may take, and that one process comes back."""

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

GRACE = 30.0
"""Seconds between the interruption of a call and the end of a process in which nothing came of it."""
REPEAT = 1.0
"""Seconds until a call is interrupted again that went on all the same."""
CHILD_RETURNED = (
    b"A reward or an environment forked, and the child returned: it ends here, and the run goes on in its parent. "
    b"Let the child end by os._exit(), or start a program with `subprocess`.\n"
)
FORKED = 70
"""Exit status of a forked process that came back from code which is not ours."""


def in_this_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns; a process that it has forked ends here, or there would be two of this one."""
    owner = os.getpid()
    try:
        return function(*arguments)
    finally:
        if os.getpid() != owner:
            os.write(2, CHILD_RETURNED)
            os._exit(FORKED)


class _Late(BaseException):
    """Raised within a call that is late; no `except Exception` of the call's own takes it for a fault of its own."""


def call(function: Callable[..., Any], *arguments: Any, seconds: float | None) -> Any:
    """Return what a function returns.

    In the main thread a late call is interrupted by an alarm, which also ends what loops in Python, sleeps, waits for a
    socket or matches a regular expression; in another thread it is abandoned (see `abandon`). Native code that holds
    the interpreter hears neither: `GRACE` seconds later `faulthandler`, whose clock needs no interpreter, prints the
    lines at which all threads stand and ends the process with status 1.

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
        return in_this_process(function, *arguments)
    end_if_held(seconds)
    try:
        if threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer"):
            with _alarm(seconds):
                return in_this_process(function, *arguments)
        running = in_thread(function, *arguments)
        try:
            return running.result(seconds)
        except TimeoutError:
            if running.done():  # the function's own
                raise
            abandon(running)
            raise TimeoutError(f"not done within {seconds:g} s") from None
    finally:
        faulthandler.cancel_dump_traceback_later()


def end_if_held(seconds: float) -> None:
    """End this process, telling of all threads, unless this is called again or cancelled within seconds and `GRACE`."""
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=sys.__stderr__)


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


_leaving = threading.Lock()


class Running(Future[Any]):
    """A call in a thread; `thread` is its number while the function has not returned."""

    thread: int | None = None


def in_thread(function: Callable[..., Any], *arguments: Any) -> Running:
    """Return a call in a thread, beside all others."""
    running = Running()
    running.set_running_or_notify_cancel()

    def run() -> None:
        running.thread = threading.get_ident()
        try:
            result, settle = in_this_process(function, *arguments), running.set_result
        except BaseException as error:
            # A future cannot hold StopIteration, nor should an exit be anybody's but this call's.
            wrapped = isinstance(error, StopIteration) or not isinstance(error, Exception)
            result = RuntimeError(f"it raised {type(error).__name__}") if wrapped else error
            settle = running.set_exception
        with _leaving:  # an abandoned thread gets its exit here at the latest
            running.thread = None
        settle(result)

    threading.Thread(target=run, name="user code", daemon=True).start()  # a daemon: what hangs keeps no process alive
    return running


def abandon(running: Running) -> None:
    """End the thread of a late call, at its next line of Python; what waits outside of Python for ever stays there."""
    with _leaving:
        if running.thread is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(running.thread), ctypes.py_object(SystemExit))
