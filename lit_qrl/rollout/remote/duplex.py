"""A connection over which weights travel beside whatever else is asked: a thread reads it, and sorts what comes."""

import pickle
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from lit_qrl.rollout.remote.transfer import dumps

BESIDE = ("staging", "stage", "staged", "unstaged")
"""First words of messages that are not part of a call and its answer: of weights that come while an engine draws."""


class Duplex:
    """Sends and receives messages, each with bytes that follow it, in any thread.

    Args:
        connection: of `multiprocessing.connection`.
        beside: called in the reading thread with each of `BESIDE`; without it they wait for `receive`, apart from the
            rest.
    """

    def __init__(self, connection: Any, beside: Callable[[Any], None] | None = None) -> None:
        self.connection, self._beside = connection, beside
        self._came: dict[bool, deque[Any]] = {False: deque(), True: deque()}
        self._changed, self._sending, self._ending = threading.Condition(), threading.Lock(), threading.Lock()
        self._over: Exception | None = None
        self.thread = threading.Thread(target=self._read, name="connection", daemon=True)
        self.thread.start()

    def send(self, message: Any, following: Sequence[Any] | None = None) -> None:
        """Send a message; pieces that follow it are its last part for who receives it.

        Args:
            message: a tuple.
            following: pieces of memory; None where the message has none at all.
        """
        sizes = None if following is None else [memoryview(piece).nbytes for piece in following]
        with self._sending:
            self.connection.send_bytes(dumps((message, sizes)))
            for piece in following or ():
                self.connection.send_bytes(piece)

    def receive(self, beside: bool = False) -> Any:
        """Return the next message, when it has come.

        Args:
            beside: one of `BESIDE`, instead of any other.

        Raises:
            EOFError: where the other side is gone.
            OSError: where the connection is.
        """
        came = self._came[beside]
        with self._changed:
            self._changed.wait_for(lambda: came or self._over is not None)
            if not came:
                assert self._over is not None
                raise self._over
            message = came.popleft()
        if isinstance(message, Exception):
            raise message
        return message

    def poll(self, seconds: float = 0.0) -> bool:
        """Return whether `receive` would not wait, within so many seconds."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: self._came[False] or self._over is not None, seconds))

    def fileno(self) -> int:
        """Return the descriptor of the connection."""
        return self.connection.fileno()

    def hang_up(self) -> None:
        """End the connection, also under threads that wait for what comes over it, or goes; again it changes nothing.

        Its descriptor is closed by the thread that reads, when nobody uses it: another connection may get its number.
        """
        with self._ending:
            if not self.connection.closed:
                held = socket.socket(fileno=self.connection.fileno())
                with suppress(OSError):
                    held.shutdown(socket.SHUT_RDWR)
                held.detach()

    def _read(self) -> None:
        while True:
            try:
                message = self._next()
            except (EOFError, OSError) as error:
                self._end(error)
                return
            except Exception as error:  # what cannot be read here, such as an object of a class that only one side has
                message = error
            beside = isinstance(message, tuple) and message[0] in BESIDE
            if beside and self._beside is not None:
                self._beside(message)
                continue
            with self._changed:
                self._came[beside].append(message)
                self._changed.notify_all()

    def _end(self, error: Exception) -> None:
        with self._changed:
            self._over = error
            self._changed.notify_all()
        self.hang_up()  # wakes who sends
        with self._sending, self._ending:
            self.connection.close()

    def _next(self) -> Any:
        message, sizes = pickle.loads(self.connection.recv_bytes())
        if sizes is None:
            return message
        following = [bytearray(size) for size in sizes]
        for piece in following:
            self.connection.recv_bytes_into(piece)
        return (*message, following)
