"""A call that draws, which another thread interrupts between two steps of the engine, and the connection meanwhile."""

import threading
from collections.abc import Callable


class Pausing:
    """Says which thread uses a connection: the one that draws, or, while the engine stands still, another.

    The other asks for a pause; the server says that it has come to one, which the drawing thread hears and hands the
    connection over. Where nothing is drawn, what would begin waits instead.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._drawing = self._wanted = self._handed = False

    # ----------------------------------------------------------------------------------------------- the one that draws

    def begin(self, ask: Callable[[], None]) -> None:
        """Wait for the end of a pause, and ask the server to draw.

        Args:
            ask: sends the question.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._wanted)
            self._drawing = True
            try:
                ask()
            except BaseException:
                self._drawing = False
                raise

    def hand_over(self, go_on: Callable[[], None]) -> None:
        """Leave the connection to the other until the pause is over.

        Args:
            go_on: tells the server, where the other does not want the pause any more that it asked for.
        """
        with self._changed:
            if not self._wanted:
                go_on()
                return
            self._handed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._handed)

    def over(self) -> bool:
        """Return True after an answer; False where a pause was asked for, of which the server will say a word yet."""
        with self._changed:
            if self._wanted:
                return False
            self._drawing = False
            return True

    def end(self) -> None:
        """Draw no more, whatever happened."""
        with self._changed:
            self._drawing = self._handed = False
            self._changed.notify_all()

    # ------------------------------------------------------------------------------------------------------- the other

    def want(self, ask: Callable[[], None]) -> None:
        """Ask for a pause.

        Args:
            ask: tells the server, where it draws.
        """
        with self._changed:
            self._wanted = True
            if self._drawing:
                ask()

    def wait(self) -> bool:
        """Wait until the connection is this thread's, and return whether a draw was interrupted for it."""
        with self._changed:
            self._changed.wait_for(lambda: self._handed or not self._drawing)
            return self._handed

    def release(self, tell: Callable[[], None]) -> None:
        """End the pause.

        Args:
            tell: the server, where it stands still.
        """
        with self._changed:
            try:
                if self._handed:
                    tell()
            finally:  # taken back here, so that a pause asked for before the other wakes is not taken for this one
                self._wanted = self._handed = False
                self._changed.notify_all()
