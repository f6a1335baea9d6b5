"""What the garbage collector does while thousands of tensors and their receipts are made."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEVER = 1 << 30


@contextmanager
def young_garbage_alone() -> Iterator[None]:
    """Have the garbage collector look at young objects alone.

    Each expert's tensors and receipts are objects that stay, so that their number has it walk through all objects of
    all libraries during a publish: half a second each time, and it finds nothing.
    """
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*before)
