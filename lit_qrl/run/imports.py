"""How libraries are imported."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Let no garbage be looked for while many objects are made that stay, of which each search would walk through all.

    While libraries are imported it is a fifth of the time. In a publish each expert's tensors and receipts are objects.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
