"""The parsers of `lit-qrl`: what they refuse is one paragraph, and a command's parser is made from its function."""

import importlib
import inspect
import json
import re
import sys
from argparse import SUPPRESS, Action, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NoReturn, get_args, get_origin

from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace

from lit_qrl.cli.errors import readable
from lit_qrl.errors import ConfigError, nearest

TRUTHS = {"true": "true", "yes": "true", "1": "true", "false": "false", "no": "false", "0": "false"}
"""Words for a parameter that is a bool, and the parser's own."""


class ReadableParser(ArgumentParser):
    """A parser whose errors are a `ConfigError` of one paragraph, and whose options are written out."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # The parsers of subcommands take this from their parent: a misspelt option must not be taken for a longer one.
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def classes(self, key: str) -> Iterable[str]:
        """Return the names that a `class_path` may have at a key."""
        return ()

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise the paragraph; `main` prints it."""
        options = dict(self._option_string_actions)
        for command in getattr(self._subcommands_action, "_name_parser_map", {}).values():
            options |= command._option_string_actions
        raise ConfigError(readable(message, self.classes, options)) from ex


class CommandParser(ReadableParser):
    """The parser of a command that is a function: its options are the parameters, their help is the docstring's.

    Required parameters are positional, unless the function takes them by keyword only. A sequence is given as several
    words, and a bool may stand without a value. The docstring's first paragraph is the description, and what stands
    between it and `Args:` comes after the options.

    Args:
        function: the command; its name is the word after `lit-qrl`.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        text = (inspect.getdoc(function) or "").partition("\nArgs:\n")[0]
        description, _, epilog = text.partition("\n\n")
        self._hints: dict[str, Any] = {}
        super().__init__(
            prog=f"lit-qrl {function.__name__}", description=description, epilog=epilog.strip(), formatter_class=Help
        )
        self._hints = {name: one.annotation for name, one in inspect.signature(function).parameters.items()}
        self.add_function_arguments(function, as_group=False, as_positional=True)
        self._shown = {one.dest: (one.option_strings or [str(one.metavar)])[0] for one in self._actions}

    def add_argument(self, *names: str, **kwargs: Any) -> Action | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Add an argument; one of the function's parameters takes as many words as its type says."""
        name = names[0].lstrip("-")
        hint = self._hints.get(name)
        if hint is bool:
            kwargs |= {"nargs": "?", "const": True}
        elif hint in (int, int | None):
            kwargs["metavar"] = "N"
        elif hint and get_origin(hint) is not Literal:  # of which all choices are shown
            kwargs["metavar"] = name.rpartition("_")[2].upper()
        if get_origin(hint) is Sequence:
            (kind,), default, names = get_args(hint), kwargs.get("default"), names[:1]
            kwargs |= {"type": kind, "nargs": "*" if default == () else "+", "metavar": name.removesuffix("s").upper()}
            kwargs["action"] = "store" if default else "extend"  # given again, it has the words of both
            if default is not None:
                kwargs["default"] = list(default)
        return super().add_argument(*names, **kwargs)

    def parse_args(self, args: Sequence[str], **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the arguments; a misspelt option is named before one that is missing because of it."""
        return super().parse_args(list(self._words(args)), **kwargs)

    def _words(self, args: Sequence[str]) -> Iterator[str]:
        """Yield the words, a bool and its value as one; a value that may be left out must not take a positional's."""
        rest, positional = list(args), any(not one.option_strings for one in self._actions)
        while rest:
            word = rest.pop(0)
            option, equals, value = word.partition("=")
            action = self._option_string_actions.get(option)
            if option.startswith("--") and action is None:
                raise ConfigError(
                    f"{option} is not an option of {self.prog}.", remedy=nearest(option, self._option_string_actions)
                )
            if action and self._hints.get(action.dest) is bool:
                if not equals:
                    taken = rest and not rest[0].startswith("--") and (rest[0].lower() in TRUTHS or not positional)
                    value = rest.pop(0) if taken else "true"
                word = f"{option}={TRUTHS.get(value.lower(), value)}"
            yield word

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise the paragraph, in which parameters are called as on the command line."""
        message = re.sub(r'(?<=Parser key ")\w+', lambda found: self._shown[found[0]], message)
        if missing := re.search(r"arguments are required: (.*)", message):
            text = f"The following arguments are required: {', '.join(self._shown[k] for k in missing[1].split(', '))}."
        elif (stray := re.search(r"unrecognized arguments?: ([^\s-]\S*)", message)) and "model" in self._hints:
            text = f"The model comes after --model. Given: {stray[1]}. Write --model {stray[1]}."
        else:
            text = readable(message, options=self._option_string_actions)
        raise ConfigError(text[:1].upper() + text[1:], remedy=f"See {self.prog} --help.") from ex


class Help(DefaultHelpFormatter, RawDescriptionHelpFormatter):
    """Help in which examples keep their lines; defaults and what is required are told, types are not."""

    def _get_help_string(self, action: Action) -> str:
        text, default = (action.help or "").removesuffix("."), action.default
        if action.required and action.option_strings:
            return f"{text} (required)"
        if default in (None, SUPPRESS, []) or "default:" in text:
            return text
        if isinstance(default, list):
            default = " ".join(default)
        elif isinstance(default, bool):
            default = str(default).lower()
        elif isinstance(default, float):
            default = f"{default:g}"
        return f"{text} (default: {default})"


def run(function: Callable[..., Any], args: Sequence[str]) -> Any:
    """Return what a command returns when it is called with the words of the command line.

    Raises:
        ConfigError: for words that it does not take.
    """
    return function(**vars(CommandParser(function).parse_args(args)))


KEYS = ("rewards", "correct")
"""Parameters that take rewards."""
CLASS_PATH = "lit_qrl.rewards.function.FunctionReward"
_OPTION = re.compile(rf"--({'|'.join(KEYS)})(\+?)=(.*)", re.DOTALL)


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
    given = value.as_dict() if isinstance(value, Namespace) else value
    path = given.get("class_path") if isinstance(given, Mapping) else given
    if not isinstance(path, str) or not _is_function(path):
        return value
    arguments = (given.get("init_args") or {}) if isinstance(given, Mapping) else {}
    where, _, name = path.rpartition(".")
    if not hasattr(sys.modules.get(where), name):
        arguments = {}  # `FunctionReward` says that there is none of the name, before options that it does not have
    return {"class_path": CLASS_PATH, "init_args": {"function": path, **arguments}}


def _is_function(path: str) -> bool:
    """Return whether a dotted path is one of a function; `FunctionReward` says what is wrong with one in a module."""
    where, _, name = path.rpartition(".")
    if not where or not all(part.isidentifier() for part in path.split(".")):
        return False
    try:
        found = getattr(importlib.import_module(where), name, None)
    except ImportError:
        return False
    except Exception:  # of the module's own code
        return True
    return found is None or (callable(found) and not inspect.isclass(found))
