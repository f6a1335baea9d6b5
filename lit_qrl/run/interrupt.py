"""Ctrl-C, SIGTERM and SIGHUP: a run ends where it can be continued, and its exit status says what ended it.

One process ends at once, or after the updates under way. Several end at the same place, or those that go on would wait
in a collective for ever: a handler notes the signal and tells the other processes, each of which cuts what it draws;
then, and at the boundaries of an iteration, all ranks learn whether one of them has noted any.

What a user's code makes of that does not count: a command whose code holds on to a signal is ended by `Deadline`.
"""

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What a person, what a cluster and what a terminal sends that is closed."""
ECHO = 1.0
"""Seconds in which a signal to one of several processes may come twice: from a terminal, and from what started them."""
LET_GO = 15.0
"""Seconds in which code that a signal was raised in must have let go, as must what ends a command after that."""


class Interrupted(KeyboardInterrupt):
    """A run that a signal ended.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.number, self.told = number, False

    @property
    def status(self) -> int:
        """The exit status of a process that a signal ended, by the shells' convention: 130, 143 or 129."""
        return 128 + self.number


class Cut(Interrupted):
    """A signal to any of several processes has ended what this one draws; it goes on to meet the others."""


class InterruptedTogether(SystemExit):
    """What every process of a run raises at the same place, after a signal that at least one of them got.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


class Deadline:
    """Ends the process of a command in which a signal was raised and does not arrive, as in a loop that catches all.

    Only a command has one: the interpreter of a program that calls the Trainer is not ours to end. It takes a thread
    that gets its turn: a call that holds the interpreter itself is for SIGKILL.
    """

    def __init__(self) -> None:
        self.enabled, self.last_words = False, list[Callable[[int], None]]()
        self._under_way: object = None

    def begin(self, number: int) -> None:
        """Give what runs `LET_GO` seconds after a signal, unless they run already; a handler may call this."""
        if self.enabled and self._under_way is None:
            self._under_way = object()
            _thread.start_new_thread(self._end, (number, self._under_way))  # takes no lock of the code that it meets

    def arrived(self) -> None:
        """Take as long as it takes: the signal is in hands that end the run."""
        self._under_way = None

    def _end(self, number: int, meant: object) -> None:
        time.sleep(LET_GO)
        if self._under_way is not meant:
            return
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        at = "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
        text = f"{signal.Signals(number).name} was not let through for {LET_GO:g} s{at}, so the process is ended."
        os.write(2, f"\nlit-qrl: {text}\n\n".encode())
        try:
            for words in self.last_words:
                words(number)
        finally:
            os._exit(128 + number)


deadline = Deadline()


class Interruption:
    """Turns the signals into `Interrupted`: at once, or when `resume` is called where a step must not be cut.

    Where there are several processes the first signal raises nothing but `Cut` in `cut`: whoever asks `pending` raises
    in all of them. A second signal is never put off.
    """

    def __init__(self) -> None:
        self.pending: int | None = None
        self.deferred = self.together = False
        self._cuts = self._passed_on = False
        self._first: float | None = None
        self._tell: Callable[[int], None] | None = None
        self._before: dict[int, Any] = {}
        self._process = os.getpid()
        self._lock = threading.Lock()

    def install(self, together: bool = False, tell: Callable[[int], None] | None = None) -> None:
        """Take over the signals, in the main thread; a second call changes nothing.

        Args:
            together: whether other processes must end at the same place.
            tell: gives them the number of the first signal that this one gets.
        """
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        self.pending, self.deferred, self.together, self._tell = None, False, together, tell  # of a run before
        self._cuts = self._passed_on = False
        self._first = None
        self._process = os.getpid()
        kept = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else []  # under nohup
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS if number not in kept}

    def remove(self) -> None:
        """Give the signals back; what was raised has arrived."""
        deadline.arrived()
        with self._lock:
            for number, handler in self._before.items():
                if signal.getsignal(number) in (self._handle, signal.SIG_IGN):  # the Trainer may have given it back
                    signal.signal(number, handler if handler is not None else signal.SIG_DFL)
            self._before = {}

    def defer(self) -> None:
        """Put off what comes from now on until `resume`."""
        self.deferred = True

    def resume(self) -> None:
        """Raise what was put off.

        Raises:
            Interrupted: when a signal came since `defer`.
        """
        self.deferred = False
        if self.pending is not None and not self.together:
            self._raise(self.pending)

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Let the first signal of any process cut what stands in it, none of which may be a collective.

        Raises:
            Cut: when there is one, or was one before.
        """
        try:
            self._cuts = self.together
            if self._cuts and self.pending is not None:
                raise Cut(self.pending)
            yield
        finally:
            self._cuts = False

    def pass_on(self, number: int) -> None:
        """Take a signal that another process got; another thread than the main one may call this."""
        with self._lock:  # the signal must not meet the handler of before
            if self._before and self.pending is None:
                self._passed_on = True
                signal.pthread_kill(threading.main_thread().ident or 0, number)  # it may sleep

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._process != os.getpid():  # of a copy that is at work for somebody, as processes of its kind are
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        own, self._passed_on, now = not self._passed_on, False, time.monotonic()
        first = own and self._first is None
        if first:
            self._first = now
        again = own and not first and now - (self._first or 0.0) >= (ECHO if self.together else 0.0)
        self.pending = number
        if self.together and not again:
            if first and self._tell is not None:
                self._tell(number)
            if self._cuts:
                self._cuts = False
                raise Cut(number)
            return
        if self.deferred and not again:
            print("\nInterrupted: the iteration's updates end first; once more ends the run at once.", flush=True)
            return
        self._raise(number)

    def _raise(self, number: int) -> NoReturn:
        deadline.begin(number)
        raise Interrupted(number)
