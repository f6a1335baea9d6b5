"""The phases of a command's start, a line each with its seconds: whoever waits sees for what."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

BEGAN = time.monotonic()
"""When this was first imported, which a command does before it imports anything large."""
SHOWN_FROM = 1.0
"""Seconds from which a phase has a line."""
_within: list[float] = []
"""Seconds of the phases inside each phase that is under way."""


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Say how long what stands within took, without the phases inside it, where that is a second or more.

    Args:
        name: of the phase, as its line begins.
    """
    began = time.monotonic()
    _within.append(0.0)
    try:
        yield
    finally:
        seconds, inside = time.monotonic() - began, _within.pop()
        if _within:
            _within[-1] += seconds
    if seconds - inside >= SHOWN_FROM:
        log.info("%s: %.1f s", name, seconds - inside)
