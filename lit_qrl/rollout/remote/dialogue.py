"""A dialogue on its way to engines in other processes: asked for over the connection, and dealt to several of them."""

import threading
import time
from typing import Any, Protocol

from lit_qrl.errors import StoppedError
from lit_qrl.rollout.engine import Dialogue, Turn, Wait
from lit_qrl.types import Completion

PATIENCE = 1.0
"""Seconds after which an engine that waits for a turn may look at its clock."""
QUIET = 0.1
"""Seconds without a new turn after which an engine that wants all of them gets those that are there."""


class GivenUpError(RuntimeError):
    """Raised to an engine whose dialogue ends because another one died of its part."""


class Line(Protocol):
    """The server's end of a connection."""

    def _send(self, *message: Any) -> None: ...

    def _receive(self) -> Any: ...


class AskedDialogue:
    """What an engine sees of a dialogue that the run holds: every question goes there.

    Args:
        line: to the run.
        number: of the call, which the run's answers belong to.
    """

    def __init__(self, line: Line, number: int) -> None:
        self._line, self._number = line, number

    @property
    def open(self) -> bool:
        """True while some sequence has not ended."""
        return self._ask("open")

    def waiting(self, wait: Wait) -> list[Turn]:
        """Return the turns that can be drawn now; see `Dialogue`."""
        return self._ask("waiting", wait)

    def has_ended(self, index: int) -> bool:
        """Return True where a sequence has ended."""
        return self._ask("has_ended", index)

    def answered(self, turn: Turn, completion: Completion) -> None:
        """Send the answer of a turn."""
        self._line._send("answered", self._number, (turn, completion))

    def _ask(self, *question: Any) -> Any:
        self._line._send("ask", self._number, question)
        kind, *told = self._line._receive()
        if kind != "told":
            raise StoppedError("The run has given up the conversations that this engine draws.")
        return told[0]


def told(dialogue: Dialogue, what: str, *args: Any) -> Any:
    """Return what an engine asks of a dialogue.

    Args:
        dialogue: that the run holds.
        what: one of its names.
        *args: of a method.
    """
    found = getattr(dialogue, what)
    return found(*args) if callable(found) else found


class Dealt:
    """One dialogue for several engines, which draw at the same time: sequence i is that of the (i mod n)-th.

    A thread of its own waits for turns, so that no engine waits for another.

    Args:
        dialogue: of all.
        engines: how many.
    """

    def __init__(self, dialogue: Dialogue, engines: int) -> None:
        self.dialogue = dialogue
        self._turns: list[list[Turn]] = [[] for _ in range(engines)]
        self._changed = threading.Condition()
        self._over = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._deal, name="dialogue", daemon=True)

    def __enter__(self) -> "Dealt":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._thread.join(2 * PATIENCE)

    def _deal(self) -> None:
        try:
            while self.dialogue.open and not self._over:
                turns = self.dialogue.waiting("any")
                with self._changed:
                    for turn in turns:
                        self._turns[turn.index % len(self._turns)].append(turn)
                    self._changed.notify_all()
        except Exception as error:
            self._error = error
        with self._changed:
            self._changed.notify_all()

    def give_up(self) -> None:
        """Let no engine wait for sequences of one that died, which nobody answers any more."""
        with self._changed:
            self._error = self._error or GivenUpError("Another engine died, so that all is drawn again.")
            self._changed.notify_all()

    def part(self, engine: int) -> "Part":
        """Return what an engine sees of it."""
        return Part(self, engine)

    def take(self, engine: int, wait: Wait) -> list[Turn]:
        """Return the turns of an engine, as `Dialogue.waiting` does.

        Raises:
            Exception: what the dialogue raised.
        """
        deadline = time.monotonic() + PATIENCE
        with self._changed:
            own = self._turns[engine]
            while wait != "no" and self._error is None and self.dialogue.open:
                left, before = deadline - time.monotonic(), len(own)
                if left <= 0 or (own and wait == "any"):
                    break
                self._changed.wait(min(left, QUIET))
                if own and len(own) == before:
                    break
            if self._error is not None:
                raise self._error
            found, self._turns[engine] = own, []
        return found


class Part:
    """A dialogue of some of the sequences."""

    def __init__(self, whole: Dealt, engine: int) -> None:
        self._whole, self._engine = whole, engine

    @property
    def open(self) -> bool:
        """True while some sequence has not ended, if of another engine."""
        return self._whole.dialogue.open

    def waiting(self, wait: Wait) -> list[Turn]:
        """Return this engine's turns that can be drawn now."""
        return self._whole.take(self._engine, wait)

    def has_ended(self, index: int) -> bool:
        """Return True where a sequence has ended."""
        return self._whole.dialogue.has_ended(index)

    def answered(self, turn: Turn, completion: Completion) -> None:
        """Take the answer of a turn."""
        self._whole.dialogue.answered(turn, completion)
