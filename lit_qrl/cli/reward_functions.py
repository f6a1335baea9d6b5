"""Plain functions where the configuration names rewards: `class_path: my.module.score`."""

import importlib
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lit_qrl.errors import ConfigError, nearest

KEYS = ("rewards", "correct")
"""Parameters that take rewards."""
CLASS_PATH = "lit_qrl.rewards.function.FunctionReward"
_OPTION = re.compile(rf"--({'|'.join(KEYS)})(\+?)=(.*)", re.DOTALL)


class FunctionError(ConfigError):
    """The module of a reward that raises when it is imported, or has nothing of its name."""


def in_object(values: Any) -> None:
    """Replace functions in the arguments of a class by the reward that calls them, in place.

    >>> values = {"rewards": [{"class_path": "math.gcd", "init_args": {"weight": 0.5}}]}
    >>> in_object(values)
    >>> values["rewards"][0]["init_args"]
    {'function': 'math.gcd', 'weight': 0.5}
    """
    for key in (*KEYS, *(f"{key}+" for key in KEYS)):
        if key in values and values[key] is not None:
            values[key] = _replaced(values[key])


def in_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with the same done to what stands behind an option for rewards.

    >>> in_words(["--rewards+=math.gcd"])
    ['--rewards+={"class_path": "lit_qrl.rewards.function.FunctionReward", "init_args": {"function": "math.gcd"}}']
    """
    return [_word(word) for word in words]


def _word(word: str) -> str:
    import yaml

    found = _OPTION.fullmatch(word)
    if found is None:
        return word
    try:
        value = yaml.safe_load(found[3])
    except yaml.YAMLError:
        return word
    replaced = _replaced(value)
    return word if replaced == value else f"--{found[1]}{found[2]}={json.dumps(replaced)}"


def _replaced(value: Any) -> Any:
    if isinstance(value, list):
        return [_replaced(one) for one in value]
    path = value if isinstance(value, str) else _get(value, "class_path")
    if not isinstance(path, str) or not _is_function(path):
        return value
    arguments = _get(value, "init_args") or {}
    arguments = dict(arguments.items()) if not isinstance(arguments, Mapping) else dict(arguments)
    return {"class_path": CLASS_PATH, "init_args": {"function": path, **arguments}}


def _get(value: Any, key: str) -> Any:
    if isinstance(value, Mapping):
        return value.get(key)
    return value.get(key) if hasattr(value, "items") else None  # the parser's Namespace


def _is_function(path: str) -> bool:
    """Return whether a dotted path is one of a function; the parser says what is wrong with one of a class."""
    where, _, name = path.rpartition(".")
    if not where or not all(part.isidentifier() for part in path.split(".")):
        return False
    try:
        module = importlib.import_module(where)
    except ImportError:
        return False
    except Exception as error:
        raise FunctionError(
            f"The module {where!r} of the reward {path!r} raises when it is imported.",
            given=f"{type(error).__name__}: {' '.join(str(error).split())}",
            remedy="Correct it.",
        ) from error
    if not hasattr(module, name):
        known = [
            key
            for key, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", where) == where and not key.startswith("_")
        ]
        hint = nearest(name, known) if known else "It has no function."
        raise FunctionError(f"There is no reward {name!r} in {where!r}.", remedy=hint)
    found = getattr(module, name)
    return callable(found) and not inspect.isclass(found)
