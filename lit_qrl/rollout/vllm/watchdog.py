"""Notices work of an in-process engine that never returns, and ends it: a step, its start, a publish, sleep, wake."""

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from lit_qrl.rollout.vllm.folder import remove_all

GRACE = 30.0
"""Seconds between the interruption of a step and the end of a process in which nothing came of it."""
EXIT_HUNG = 75
"""Exit status of such a process: EX_TEMPFAIL of sysexits.h, which asks to be started again."""


class Watchdog:
    """Watches over the steps of one call: `beat` before each.

    A step longer than `timeout` is interrupted: a signal makes Python, a lock or a sleep raise `TimeoutError` in the
    main thread. Native code that waits for a device answers no signal, and no part of this process can go on without
    it; when nothing has moved after `grace` more seconds, `on_hang` is called and the process ends with `EXIT_HUNG`.

    Args:
        timeout: seconds that one step may take.
        on_hang: called with a sentence before the process ends, in the watching thread.
        grace: seconds.
        what: the work, as the subject of a sentence.
    """

    def __init__(
        self,
        timeout: float,
        on_hang: Callable[[str], None] | None = None,
        grace: float = GRACE,
        what: str = "one step",
    ) -> None:
        self.timeout, self.on_hang, self.grace, self.what = timeout, on_hang, grace, what
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._begun = time.monotonic()
        self._previous: Any = None
        self._interrupts = threading.current_thread() is threading.main_thread()
        self._thread = threading.Thread(target=self._watch, name="engine watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self._interrupts:
            self._previous = signal.signal(signal.SIGUSR2, self._raise)
        self.beat()
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            with self._lock:  # no signal is sent after this
                self._stopped.set()
        finally:
            self._stopped.set()
            if self._interrupts:
                signal.signal(signal.SIGUSR2, self._previous)

    def beat(self) -> None:
        """Start the clock of the next step."""
        self._begun = time.monotonic()

    def _sentence(self) -> str:
        return f"{self.what} took longer than {self.timeout:g} s"

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if not self._stopped.is_set():
            raise TimeoutError(self._sentence())

    def _watch(self) -> None:
        interrupted: float | None = None
        while not self._stopped.wait(min(max(self.timeout, self.grace) / 20, 1.0)):
            with self._lock:
                late = time.monotonic() - self._begun - self.timeout
                if self._stopped.is_set() or late <= 0:
                    continue
                if interrupted != self._begun and self._interrupts:
                    interrupted = self._begun
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)
            if late > self.grace:
                self._end_process()

    def _end_process(self) -> None:
        sentence = (
            f"The engine hangs: {self._sentence()}, and it could not be interrupted. The process ends with status "
            f"{EXIT_HUNG}; start the run again from its last checkpoint."
        )
        print(f"\n{sentence}\n", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
        # Where even this blocks, the process must still end.
        deadline = threading.Timer(self.grace, os._exit, (EXIT_HUNG,))
        deadline.daemon = True
        deadline.start()
        try:
            remove_all()  # what runs at the end of a process does not run here
            if self.on_hang is not None:
                self.on_hang(sentence)
        finally:
            os._exit(EXIT_HUNG)
