"""The errors of the project that the command line turns into a paragraph instead of a traceback."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

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
        return (_rebuild, (type(self), self.what, self.expected, self.given, self.remedy))


def _rebuild(cls: type[ConfigError], what: str, expected: object, given: object, remedy: str) -> ConfigError:
    return cls(what, expected=expected, given=given, remedy=remedy)


class IncompleteError(ValueError):
    """A stream of weights that lacks some of those that it must have; `fit` ends as after a publish that failed."""


class StoppedError(RuntimeError):
    """A run whose configuration may be right and that could not go on; `lit-qrl` prints it and exits with status 70."""


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


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return a "did you mean" sentence for `name`, or the list of choices when nothing is close.

    >>> nearest("fp8_rows", ["fp8_row", "bf16"])
    "Did you mean 'fp8_row'?"
    """
    choices = list(choices)
    close = difflib.get_close_matches(name, choices, n=1)
    return f"Did you mean {close[0]!r}?" if close else f"Choose one of {', '.join(choices)}."


def listed(names: Iterable[str], shown: int = 5) -> str:
    """Return the first names, and how many there are more.

    >>> listed("abc", 2)
    'a, b and 1 more'
    """
    names = list(names)
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")
