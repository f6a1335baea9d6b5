"""The parser of the commands that are not the Trainer's: what it refuses is one paragraph."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from lit_qrl.errors import ConfigError, nearest


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are a `ConfigError` and whose options are written out.

    Args:
        command: the word after `lit-qrl`.
        description: what the command does.
        epilog: examples.
    """

    def __init__(self, command: str, description: str, epilog: str) -> None:
        super().__init__(
            prog=f"lit-qrl {command}",
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the arguments; a misspelt option is named before one that is missing because of it."""
        for word in args or ():
            option = word.partition("=")[0]
            if option.startswith("--") and option not in self._option_string_actions:
                raise ConfigError(
                    f"{option} is not an option of {self.prog}.", remedy=nearest(option, self._option_string_actions)
                )
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise the paragraph; `main` prints it."""
        raise ConfigError(f"{message[:1].upper()}{message[1:]}.", remedy=f"See {self.prog} --help.")
