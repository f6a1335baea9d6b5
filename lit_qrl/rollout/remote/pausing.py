"""A call that draws, which another thread interrupts between two steps of the engine, and the connection meanwhile."""

import threading
from collections import deque
from collections.abc import Callable, Iterable

from lit_qrl.errors import StoppedError
from lit_qrl.rollout.pauses import Stand

DIFFERS = "What computes differs: other hardware, another number of threads, or kernels that do not repeat."


class AstrayError(StoppedError):
    """An engine that did not come to where it was to stand still, so that the run is not the one that it follows."""


class Pausing:
    """Says which thread uses a connection: the one that draws, or, while the engine stands still, another.

    The other asks for a pause; the server says that it has come to one, which the drawing thread hears and hands the
    connection over. Where nothing is drawn, what would begin waits instead.

    Where a course is followed the server stands still of its own accord, at the steps that it was told as it began, and
    the drawing thread waits for the other there; so it does before it begins what the other comes before.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._drawing = self._wanted = self._handed = False
        self._rollout: int | None = None
        self._steps: int | None = None
        self._course: deque[Stand] | None = None
        self._astray: AstrayError | None = None

    @property
    def stand(self) -> Stand:
        """Where the engine stands still."""
        return Stand(self._rollout, self._steps)

    def follow(self, course: Iterable[Stand] | None) -> None:
        """Stand still at these places, one after the other, and nowhere else; None gives the course up.

        Args:
            course: of an engine that has drawn nothing yet.
        """
        with self._changed:
            self._course, self._astray = None if course is None else deque(course), None
            self._rollout = self._steps = None
            self._changed.notify_all()

    def stops(self, rollout: int | None) -> list[int]:
        """Return the steps of a rollout at which the server is to stand still."""
        return [one.steps for one in self._course or () if one.rollout == rollout and one.steps is not None]

    # ----------------------------------------------------------------------------------------------- the one that draws

    def begin(self, ask: Callable[[], None], rollout: int | None = None) -> None:
        """Wait for the end of a pause, and ask the server to draw.

        Args:
            ask: sends the question.
            rollout: its name; None is no rollout, and changes nothing in where the engine stands.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._comes_first(rollout))
            self._drawing = True
            self._rollout = self._rollout if rollout is None else rollout
            try:
                ask()
            except BaseException:
                self._drawing = False
                raise

    def _comes_first(self, rollout: int | None) -> bool:
        """Return whether a pause comes before what is to be drawn."""
        if self._course is None:
            return self._wanted
        return rollout is not None and bool(self._course) and self._course[0] == self.stand

    def hand_over(self, go_on: Callable[[], None], steps: int | None = None) -> None:
        """Leave the connection to the other until the pause is over.

        Args:
            go_on: tells the server, where the other does not want the pause any more that it asked for.
            steps: that the server has done of the rollout.
        """
        with self._changed:
            if self._course is not None:
                self._changed.wait_for(lambda: self._wanted or self._course is None)
            if not self._wanted:
                go_on()
                return
            self._handed, self._steps = True, steps
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._handed)

    def over(self) -> bool:
        """Return True after an answer; False where a pause was asked for, of which the server will say a word yet.

        Raises:
            AstrayError: where it was to stand still before.
        """
        with self._changed:
            if self._course is None and self._wanted:
                return False
            if self.stops(self._rollout):
                step = self.stops(self._rollout)[0]
                self._astray = AstrayError(
                    f"The replay left the run that it follows: weights came after step {step} of a rollout there, "
                    f"which ended before that here. {DIFFERS}"
                )
                raise self._astray
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
            ask: tells the server, where it draws and does not know of itself.
        """
        with self._changed:
            self._wanted = True
            self._changed.notify_all()
            if self._drawing and self._course is None:
                ask()

    def wait(self) -> bool:
        """Wait until the connection is this thread's, and return whether a draw was interrupted for it.

        Raises:
            AstrayError: where the engine does not come to the place at which it was to stand still.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._handed or self._astray or (not self._drawing and self._arrived()))
            if self._astray is not None:
                raise self._astray
            return self._handed

    def _arrived(self) -> bool:
        return self._course is None or not self._course or self._course[0] == self.stand

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
                if self._course and self._wanted:
                    self._course.popleft()
                self._wanted = self._handed = False
                self._steps = None
                self._changed.notify_all()
