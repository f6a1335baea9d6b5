"""What an object was made with, in the form that a configuration has for it: `class_path` and `init_args`."""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

_MADE_WITH = "_made_with"
_PLAIN = (bool, int, float, str)


class Described:
    """Remembers the arguments of its constructor, so that a run which Python code builds has its configuration too.

    Subclasses do nothing for it: every `__init__` is wrapped once, and the outermost call counts. What no configuration
    can hold, such as rows of data, a subclass names in `in_memory`: the attribute of that name stands for it as a text.

    >>> class Dial(Described):
    ...     def __init__(self, level: float = 1.0) -> None:
    ...         self.raised = level + 1
    >>> describe(Dial(2.5))["init_args"]
    {'level': 2.5}
    """

    in_memory: ClassVar[Sequence[str]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = _remembering(cls.__init__)


def _remembering(constructor: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(constructor)
    def remember(self: Any, *args: Any, **kwargs: Any) -> None:
        vars(self).setdefault(_MADE_WITH, (args, kwargs))
        constructor(self, *args, **kwargs)

    return remember


def describe(value: Any) -> Any:
    """Return a value as YAML can hold it; an object becomes its class and what it was made with.

    A class that is not `Described` gives the arguments that can be read from it, where they are not the defaults: the
    fields of a dataclass, or attributes of the parameters' names. What has no name to import it by, such as a lambda,
    becomes a text in angle brackets that says where it stands.

    >>> import torch
    >>> describe(functools.partial(torch.optim.SGD, lr=0.1))
    {'class_path': 'torch.optim.sgd.SGD', 'init_args': {'lr': 0.1}}
    """
    if value is None or type(value) in _PLAIN:
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): describe(one) for key, one in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(describe, value))
    if isinstance(value, (list, tuple)):
        return [describe(one) for one in value]
    if isinstance(value, functools.partial):
        return {"class_path": _path(value.func), "init_args": describe(value.keywords)}
    if isinstance(value, type):
        return {"class_path": _path(value)}
    if callable(value) and hasattr(value, "__qualname__"):
        return _path(value)
    if isinstance(value, _PLAIN):  # a subclass of a plain type
        return str(value) if isinstance(value, str) else value
    return {"class_path": _path(plain_class(value)), "init_args": describe(_arguments(value))}


def plain_class(value: Any) -> type:
    """Return the class that an object was made of: FSDP makes a subclass of it on the fly.

    >>> plain_class(1)
    <class 'int'>
    """
    return next(c for c in type(value).__mro__ if not c.__name__.startswith("FSDP"))


def _arguments(value: Any) -> dict[str, Any]:
    """Return the arguments with which an object is made again."""
    made_with = getattr(value, "__dict__", {}).get(_MADE_WITH)
    if made_with is not None:
        bound = inspect.signature(type(value).__init__).bind(value, *made_with[0], **made_with[1])
        bound.apply_defaults()
        found: dict[str, Any] = {}
        for name, parameter in list(bound.signature.parameters.items())[1:]:
            if parameter.kind is parameter.VAR_KEYWORD:  # of a parent's: the parser knows them too
                found.update(bound.arguments[name])
            elif parameter.kind is not parameter.VAR_POSITIONAL:
                found[name] = bound.arguments[name]
        held = {name: getattr(value, name) for name in getattr(value, "in_memory", ())}
        return found | {name: None if one is None else str(one) for name, one in held.items()}
    if is_dataclass(value):
        present = {field.name: (getattr(value, field.name), _default(field)) for field in fields(value) if field.init}
    else:
        parameters = [one for one in inspect.signature(type(value)).parameters.values() if one.name in dir(value)]
        present = {one.name: (getattr(value, one.name), one.default) for one in parameters}
        present = {name: pair for name, pair in present.items() if pair[0] is None or isinstance(pair[0], _PLAIN)}
    return {name: now for name, (now, default) in present.items() if now != default}


def _default(field: Any) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _path(named: Any) -> str:
    """Return the dotted path of a class or a function; of one that cannot be imported, where it stands."""
    module, name = named.__module__, named.__qualname__
    if "<" in name:
        code = getattr(named, "__code__", None)
        where = f" of {os.path.basename(code.co_filename)}, line {code.co_firstlineno}" if code else f" of {module}"
        return f"<{name.rpartition('.')[2].strip('<>')}{where}>"
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if module == "__main__" and script:
        module = Path(script).stem
        sys.modules.setdefault(module, sys.modules["__main__"])  # a parser that looks it up must not run it again
    return f"{module}.{name}"
