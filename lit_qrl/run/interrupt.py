"""Ctrl-C and SIGTERM: a run ends where it can be continued, and its exit status says what ended it.

One process ends at once, or after the updates under way. Several end at the same place, or those that go on would wait
in a collective for ever: a handler only notes the signal, and at the boundaries of an iteration all ranks learn whether
one of them has noted any.
"""

import signal
import threading
from types import FrameType
from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""What a person and what a cluster send."""


class Interrupted(KeyboardInterrupt):
    """A run that a signal ended.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.number = number

    @property
    def status(self) -> int:
        """The exit status of a process that a signal ended, by the shells' convention: 130 or 143."""
        return 128 + self.number


class InterruptedTogether(SIGTERMException):
    """What every process of a run raises at the same place, after a signal that at least one of them got.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


class Interruption:
    """Turns the signals into `Interrupted`: at once, or when `resume` is called where a step must not be cut.

    Where there are several processes the first signal raises nothing: whoever asks `pending` raises in all of them. A
    second signal is never put off.
    """

    def __init__(self) -> None:
        self.pending: int | None = None
        self.deferred = self.together = False
        self._before: dict[int, Any] = {}

    def install(self, together: bool = False) -> None:
        """Take over the signals, in the main thread; a second call changes nothing.

        Args:
            together: whether other processes must end at the same place.
        """
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        self.pending, self.deferred, self.together = None, False, together  # of a run before
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}

    def remove(self) -> None:
        """Give the signals back."""
        for number, handler in self._before.items():
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
            raise Interrupted(self.pending)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again, self.pending = self.pending is not None, number
        if self.together and not again:
            return
        if self.deferred and not again:
            print("\nInterrupted: the iteration's updates end first; once more ends the run at once.", flush=True)
            return
        raise Interrupted(number)
