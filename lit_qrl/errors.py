"""The errors of the project that the command line turns into a paragraph instead of a traceback."""

import difflib
import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path

EXIT_CONFIG = 2
"""Exit status of a configuration that cannot work."""
EXIT_STOPPED = 70
"""Exit status of a run that could not go on for another reason: EX_SOFTWARE of sysexits.h."""
_collection: ContextVar["list[ConfigError] | None"] = ContextVar("config_errors", default=None)


class ConfigError(ValueError):
    """A run that cannot work as configured; `lit-qrl` prints it and exits with status 2.

    Args:
        what: the key or object at fault and what is wrong with it, as one sentence.
        expected: what would have been accepted.
        given: what was found.
        remedy: what to change, as an instruction.

    >>> print(ConfigError("publisher.format is unknown.", expected="fp8_row", given="fp8_rows", remedy="Correct it."))
    publisher.format is unknown. Expected: fp8_row. Given: fp8_rows. Correct it.
    """

    def __init__(self, what: str, *, expected: object = None, given: object = None, remedy: str = "") -> None:
        self.what, self.expected, self.given, self.remedy = what, expected, given, remedy
        parts = [what]
        if expected is not None:
            parts.append(f"Expected: {expected}.")
        if given is not None:
            parts.append(f"Given: {given}.")
        if remedy:
            parts.append(remedy)
        super().__init__(" ".join(parts))
        made = _collection.get()
        if made is not None:
            made.append(self)

    def __reduce__(self) -> tuple:
        return partial(type(self), expected=self.expected, given=self.given, remedy=self.remedy), (self.what,)


class IncompleteError(ValueError):
    """A stream of weights that lacks some of those that it must have; `fit` ends as after a publish that failed."""


class StoppedError(RuntimeError):
    """A run whose configuration may be right and that could not go on; `lit-qrl` prints it and exits with status 70."""


class MemoryShortageError(StoppedError):
    """Work that needs more memory than there is; the paragraph says what it was, how much was asked, and a remedy."""


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, on a device or on the host.

    torch has a class of its own for devices, but raises `RuntimeError` on the host, as vLLM's allocator does anywhere.

    >>> out_of_memory(MemoryError()), out_of_memory(RuntimeError("CUDA Error: out of memory at …"))
    (True, True)
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and bool(re.search(r"out of memory|can't allocate memory", str(error)))


def asked(error: BaseException) -> str:
    """Return how much memory an allocator says that it was asked for and had left, as part of a sentence.

    >>> asked(RuntimeError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.81 GiB "
    ...     "of which 1.20 GiB is free."))
    '2.50 GiB were asked for and 1.20 GiB of 139.81 GiB were free'
    >>> asked(RuntimeError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.81 GiB "
    ...     "of which 79.10 GiB is free. Including non-PyTorch memory, this process has 60.4 GiB memory in use. "
    ...     "60.00 GiB allowed; Of the allocated memory 58.2 GiB is allocated by PyTorch"))
    '2.50 GiB were asked for and 79.10 GiB of 139.81 GiB were free; MemoryLimit allows 60.00 GiB'
    >>> asked(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 3221225472 bytes."))
    '3.00 GiB were asked for'
    """
    text = str(error)
    amount = re.search(r"[Tt]ried to allocate ([\d.]+) ?(\w+)", text)
    room = re.search(r"total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free", text)
    if amount is None:
        return f"the allocator said {type(error).__name__}{f': {text}' if text else ''}".rstrip(".")
    size = f"{int(amount[1]) / 2**30:.2f} GiB" if amount[2] == "bytes" else f"{amount[1]} {amount[2]}"
    limit = re.search(r"([\d.]+ \w+) allowed", text)
    free = f" and {room[2]} of {room[1]} were free" if room else ""
    return f"{size} were asked for{free}" + (f"; MemoryLimit allows {limit[1]}" if limit else "")


@contextmanager
def within_memory(doing: str, remedy: str) -> Iterator[None]:
    """Turn what an allocator raises in the block into one paragraph; the innermost such block names the work.

    Args:
        doing: the work, after "while".
        remedy: what to change, as an instruction.

    Raises:
        MemoryShortageError: when memory runs out.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, StoppedError) or not out_of_memory(error):
            raise
        raise MemoryShortageError(f"Memory ran out while {doing}: {asked(error)}. {remedy}") from error


@contextmanager
def named(path: str | Path) -> Iterator[None]:
    """Give an error of a file that is written in the block its name, which the system does not say."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a disk, a quota and a limit of the process (`ulimit -f`) say that there is no room for more."""


def not_written(path: str | Path, error: OSError) -> str:
    """Return which file could not be written, why, on which disk, and what to do, as two sentences.

    Args:
        path: of the file.
        error: of the system.

    >>> print(not_written("/no/such/a.csv", OSError(errno.ENOSPC, "No space left on device")))  # doctest: +ELLIPSIS
    /no/such/a.csv could not be written: No space left on device (/ has ... free). Free some space.
    """
    place = Path(path).absolute()
    disk = next(one for one in (place, *place.parents) if os.path.ismount(one))
    room = f" ({disk} has {shutil.disk_usage(disk).free / 2**20:,.1f} MiB free)" if error.errno in FULL else ""
    remedy = "Free some space" if error.errno in FULL else "See that the folder can be written"
    return f"{path} could not be written: {error.strerror or error}{room}. {remedy}."


@contextmanager
def collected() -> Iterator[list[ConfigError]]:
    """Give the list of the errors made in the block, also of those that a parser swallows in an error of its own.

    >>> with collected() as made:
    ...     _ = ConfigError("A key is wrong.")
    >>> made
    [ConfigError('A key is wrong.')]
    """
    made: list[ConfigError] = []
    token = _collection.set(made)
    try:
        yield made
    finally:
        _collection.reset(token)


def require_object(key: str, given: object, example: str) -> None:
    """Raise `ConfigError` for a name or a class where an object of it is wanted, which would fail later.

    Args:
        key: of the setting.
        given: what was passed.
        example: of what to pass instead.

    >>> require_object("data.engine", int, "TransformersEngine()")
    Traceback (most recent call last):
    lit_qrl.errors.ConfigError: data.engine is no object. Expected: one such as TransformersEngine(). Given: class int.
    """
    if given is None or isinstance(given, (str, bytes, os.PathLike, type, dict)):
        shown = f"class {given.__name__}" if isinstance(given, type) else repr(given)
        raise ConfigError(f"{key} is no object.", expected=f"one such as {example}", given=shown)


TELLING = 3
"""Letters from which on the beginning of a single name says which one is meant."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return a "did you mean" sentence for `name`, or the list of choices when nothing is close.

    >>> nearest("fp8_rows", ["fp8_row", "bf16"])
    "Did you mean 'fp8_row'?"
    >>> nearest("tis", ["AIS", "TruncatedIS"])
    "Did you mean 'TruncatedIS'?"
    """
    choices, small = list(choices), name.lower()
    same = [one for one in choices if small and small in (one.lower(), "".join(filter(str.isupper, one)).lower())]
    begun = [one for one in choices if len(small) >= TELLING and one.lower().startswith(small)]
    close = same or difflib.get_close_matches(name, choices, n=1) or (begun if len(begun) == 1 else [])
    return f"Did you mean {close[0]!r}?" if close else f"Choose one of {', '.join(choices)}."


def check_choice(key: str, given: object, choices: Sequence[object]) -> None:
    """Raise `ConfigError` for a value that is none of the choices, where Python was given it and no parser looked.

    >>> check_choice("data.schedule", "asynch", ["one", "async"])
    Traceback (most recent call last):
    lit_qrl.errors.ConfigError: data.schedule is unknown. Expected: one, async. Given: asynch. Did you mean 'async'?
    """
    if given not in choices:
        names = [str(choice) for choice in choices]
        raise ConfigError(
            f"{key} is unknown.", expected=", ".join(names), given=given, remedy=nearest(str(given), names)
        )


def listed(names: Iterable[str], shown: int = 5) -> str:
    """Return the first names, and how many there are more.

    >>> listed("abc", 2)
    'a, b and 1 more'
    """
    names = list(names)
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")
