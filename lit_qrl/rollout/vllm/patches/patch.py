"""What a change to vLLM's code is: the versions it is for, what it needs there, and when it can go."""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

from lit_qrl.errors import ConfigError

_MARK = "lit_qrl_original"


@dataclass(frozen=True)
class Versions:
    """The versions of vLLM from `first` on, and before `fixed` where one is known that needs the change no more.

    >>> (0, 32, 0) in Versions("0.26"), (0, 32, 0) in Versions("0.26", "0.32")
    (True, False)
    """

    first: str
    fixed: str | None = None

    def __contains__(self, version: Sequence[int]) -> bool:
        found = tuple(version)
        return _numbers(self.first) <= found and (self.fixed is None or found < _numbers(self.fixed))

    def __str__(self) -> str:
        return f"from {self.first}" if self.fixed is None else f"{self.first} to below {self.fixed}"


@dataclass(frozen=True)
class Patch:
    """A change to vLLM's code, made once per process; what it is about stands in its file.

    A symbol is "module:name" or "module:Class.name", where what an `__init__` or a function sets is a name in it, too,
    and "one|other" is either.

    Args:
        file: `__name__` of the file.
        versions: that need it.
        obsolete: when it can be removed.
        changes: from the symbols of functions to what makes ours of vLLM's.
        needs: further symbols that it relies on.
        also: makes what is no change of a function; again, it changes nothing.
        device: the only one it is for.
    """

    file: str
    versions: Versions
    obsolete: str
    changes: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    needs: Sequence[str] = ()
    also: Callable[[], None] | None = None
    device: Literal["cpu", "cuda"] | None = None

    @property
    def name(self) -> str:
        return self.file.rpartition(".")[2]

    def concerns(self, version: Sequence[int], device: str) -> bool:
        """Return True where this vLLM needs the change."""
        return version in self.versions and self.device in (None, device)

    def apply(self, version: Sequence[int]) -> None:
        """Make the change.

        Raises:
            ConfigError: where something that it changes or relies on is not there.
        """
        for symbol in (*self.changes, *self.needs):
            try:
                find(symbol)
            except (ImportError, AttributeError) as error:
                raise ConfigError(
                    f"The patch {self.name} of vLLM does not fit the installed version: {error}.",
                    expected=f"{symbol.replace(':', '.')}, which the patch changes or relies on",
                    given=f"vLLM {'.'.join(map(str, version))}",
                    remedy="Without it weights or log-probs could be wrong silently. Install an accepted version "
                    "(`lit-qrl --versions` lists them), or use TransformersEngine.",
                ) from error
        for symbol, changed in self.changes.items():
            replace(symbol, changed)
        if self.also is not None:
            self.also()


def find(symbol: str) -> tuple[Any, str]:
    """Return where the last name of a symbol is, and that name.

    Raises:
        ImportError, AttributeError: when it is not there.

    >>> owner, name = find("collections:OrderedDict.never|pop")
    >>> owner.__name__, name
    ('OrderedDict', 'pop')
    """
    module, _, path = symbol.partition(":")
    owner: Any = None
    found: Any = import_module(module)
    name = ""
    for part in path.split("."):
        owner, names = getattr(found, _MARK, found), part.split("|")
        code = getattr(owner.__init__ if isinstance(owner, type) else owner, "__code__", None)
        name = next((one for one in names if hasattr(owner, one) or one in getattr(code, "co_names", ())), None)
        if name is None:
            raise AttributeError(f"{getattr(owner, '__name__', owner)} has no {' or '.join(names)}")
        found = getattr(owner, name, None)
    return owner, name


def replace(symbol: str, changed: Callable[[Any], Any]) -> None:
    """Put `changed(original)` in the place of a function of a module or class, once."""
    owner, name = find(symbol)
    original = getattr(owner, name)
    if not hasattr(original, _MARK):
        made = changed(original)
        setattr(made, _MARK, original)
        static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        setattr(owner, name, staticmethod(made) if static else made)


def without(logger: str, text: str) -> Callable[[], None]:
    """Return what keeps a logger of vLLM's from saying messages with a text in them; again, it changes nothing.

    Args:
        logger: its symbol.
        text: a part of the messages, as they are printed.
    """

    def wanted(record: logging.LogRecord) -> bool:
        return text not in record.getMessage()

    def quieten() -> None:
        owner, name = find(logger)
        getattr(owner, name).addFilter(wanted)

    return quieten


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
