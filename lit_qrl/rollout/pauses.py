"""An engine that stands still between two of its steps, while another thread gives it weights; and where it does."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable


class Stand(NamedTuple):
    """Where an engine stands still.

    Args:
        rollout: the seed of the last one that it began to draw; None before the first.
        steps: that it has done of it; None when it has drawn all that it was asked for.
    """

    rollout: int | None = None
    steps: int | None = None


@runtime_checkable
class Pauses(Protocol):
    """An engine whose draws stop while another thread gives it weights."""

    @property
    def engines(self) -> int:
        """How many draw."""
        ...

    def pause(self) -> list[Stand]:
        """Return where each stands still when nothing is computed; the thread that draws waits until `resume`."""
        ...

    def follow(self, courses: Sequence[Sequence[Stand]]) -> None:
        """Let each stand still at these places, one pause after the other, instead of where it is asked to.

        Args:
            courses: of each, from before its first rollout.
        """
        ...

    def resume(self, whole: bool = True) -> None:
        """Let it go on, or end with `EngineDiedError` where the weights that came are not whole."""
        ...
