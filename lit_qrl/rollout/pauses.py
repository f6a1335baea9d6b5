"""An engine that stands still between two of its steps, while another thread gives it weights."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class Pauses(Protocol):
    """An engine whose draws stop while another thread gives it weights."""

    def pause(self) -> None:
        """Return when nothing is computed; the thread that draws waits until `resume`."""
        ...

    def resume(self, whole: bool = True) -> None:
        """Let it go on, or end with `EngineDiedError` where the weights that came are not whole."""
        ...
