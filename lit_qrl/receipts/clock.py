"""Where the seconds of a publish go, on each side of it."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")


class Clock:
    """Adds up the host's seconds by what they went into; a device may work on behind it.

    Attributes:
        seconds: by name; a part that is inside another is not in that one's.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the seconds of the enclosed work, less those of the parts inside it."""
        begun, before = time.perf_counter(), self._inside
        self._inside = 0.0
        try:
            yield
        finally:
            whole = time.perf_counter() - begun
            self.seconds[name] += whole - self._inside
            self._inside = before + whole

    def stream(self, name: str, items: Iterator[Item]) -> Iterator[Item]:
        """Yield a stream unchanged, and add the seconds in which its items are made.

        >>> clock = Clock()
        >>> list(clock.stream("make", iter([1, 2]))), list(clock.seconds)
        ([1, 2], ['make'])
        """
        done = object()
        while True:
            with self.part(name):
                item = next(items, done)
            if item is done:
                return
            yield item  # pyright: ignore[reportReturnType]
