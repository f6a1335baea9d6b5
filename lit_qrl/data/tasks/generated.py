"""Tasks whose problems are drawn: held out by hash, different from each other, away from published test sets."""

import hashlib
import random
from abc import abstractmethod
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from lit_qrl.data.sources import check_columns, read_rows
from lit_qrl.data.task import ListedTask, Message, Row
from lit_qrl.errors import ConfigError, check_choice
from lit_qrl.rewards.base import Reward, check_names
from lit_qrl.rewards.function import as_rewards

# One problem in eight is held out. By hash and not by draw, so that no seed trains on what another seed evaluates,
# and the policy that ships, which saw the other seven, can be evaluated under every seed.
HELD_OUT_EVERY = 8

# Draws per wanted problem before the space counts as exhausted; the last of 10,000 problems needs about 10.
MAX_DRAWS_PER_PROBLEM = 200


def key_hash(key: str) -> str:
    """Return 64 bits of BLAKE2b of a problem's key, as 16 hexadecimal digits.

    >>> key_hash("3,5,7=22")
    '8d3e06ff030e2ac9'
    """
    return hashlib.blake2b(key.encode(), digest_size=8).hexdigest()


def is_held_out(key: str) -> bool:
    """Return whether a problem belongs to the evaluation side, which no run trains on.

    >>> is_held_out("3,5,7=22")
    False
    """
    return int(key_hash(key), 16) % HELD_OUT_EVERY == 0


@cache
def read_hashes(path: Path | None) -> frozenset[str]:
    """Return the hashes of the keys of published test problems, none without a file."""
    return frozenset() if path is None else frozenset(path.read_text(encoding="utf-8").split())


class GeneratedTask(ListedTask):
    """Problems from a seeded generator; a subclass says how one is drawn, known by its key, read and posed.

    No problem is both trained on and evaluated, under any seed, and none is among the published test problems or in
    the files of `exclude`.

    Args:
        train_size: different problems to train on.
        evaluation_size: different held-out problems.
        prompt_format: `short` or `chat`.
        exclude: files whose problems are left out on both sides: JSONL with `input` "3,5,7" and `output` for
            Countdown, with the columns `Puzzle` and `Solution` for Sudoku, with a column `digits` for PrefixSum.
        evaluation_path: such a file to evaluate on instead of generated problems.
        rewards: what is learned from; by default the task's own, which also decides what counts as correct.
        seed: of the draw.

    Raises:
        ConfigError: an argument is out of range; in `setup`, a file is wrong or there are too few problems.
    """

    reward: ClassVar[type[Reward]]
    """The task's own reward: a score of 1 is a solved problem."""
    columns: ClassVar[Mapping[str, str]] = {}
    """Of a file of problems: each, and what stands there."""
    public_tests: ClassVar[Path | None] = None
    """File with the hashes of the keys of published test problems, where there are any."""

    def __init__(
        self,
        train_size: int = 8192,
        evaluation_size: int = 500,
        prompt_format: Literal["short", "chat"] = "short",
        exclude: list[str] | None = None,
        evaluation_path: str | None = None,
        rewards: list[Reward] | None = None,
        seed: int = 0,
    ) -> None:
        self.check_sizes(train_size=train_size, evaluation_size=evaluation_size)
        check_choice(f"{type(self).__name__}'s prompt_format", prompt_format, ("short", "chat"))
        self.train_size, self.evaluation_size, self.seed = train_size, evaluation_size, seed
        self.prompt_format, self.evaluation_path, self.exclude = prompt_format, evaluation_path, list(exclude or [])
        super().__init__()
        self.judge = self.reward()
        self.rewards = [self.reward()] if rewards is None else as_rewards(rewards)
        check_names(self.rewards)

    @abstractmethod
    def draw(self, rng: random.Random) -> dict[str, Any] | None:
        """Return a problem, or None when the draw gave none."""

    @abstractmethod
    def key(self, row: Row) -> str:
        """Return the text that identifies a problem."""

    def problem(self, row: Row) -> dict[str, Any]:
        """Return the problem of a row of a file with `columns`; raise for one that is none."""
        raise NotImplementedError("no file holds problems of it")

    def read(self, path: str) -> list[dict[str, Any]]:
        """Return the problems of a file.

        Raises:
            ConfigError: the file or a column is missing, or a row is no problem.
        """
        rows, problems = read_rows(path), []
        check_columns(rows, list(self.columns), path)
        for number, row in enumerate(rows, start=1):
            try:
                problems.append(self.problem(row))
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"Row {number} of {path!r} is not a problem of {type(self).__name__}.",
                    expected="; ".join(f"{name}: {what}" for name, what in self.columns.items()),
                    given=", ".join(repr(row.get(name)) for name in self.columns)[:80],
                    remedy="Correct it. Keep the column as text where digits count, since numbers lose leading zeros.",
                ) from error
        return problems

    @abstractmethod
    def short(self, row: Row) -> str:
        """Return a problem in its shortest form, for a policy that knows no other task."""

    @abstractmethod
    def instruction(self, row: Row) -> str:
        """Return a problem put in words, for a chat model."""

    def is_wanted(self, row: Row) -> bool:
        """Return whether a problem that is drawn for the first time is taken; the place for what costs time."""
        return True

    def setup(self) -> None:
        if self._train:
            return
        excluded = {key_hash(self.key(row)) for path in self.exclude for row in self.read(path)}
        excluded |= read_hashes(self.public_tests)
        if self.evaluation_path is None:
            evaluation = self._draw_rows("evaluation", excluded)
        else:
            evaluation = self.read(self.evaluation_path)[: self.evaluation_size]
            excluded |= {key_hash(self.key(row)) for row in evaluation}
        self._train, self._evaluation = self._draw_rows("train", excluded), evaluation

    def _draw_rows(self, side: Literal["train", "evaluation"], excluded: set[str]) -> list[dict[str, Any]]:
        size = self.evaluation_size if side == "evaluation" else self.train_size
        # One generator per side: the evaluation set does not depend on train_size, nor the reverse.
        rng = random.Random(f"{self.name} {self.seed} {side}")
        rows: list[dict[str, Any]] = []
        seen = set(excluded)
        for _ in range(size * MAX_DRAWS_PER_PROBLEM):
            if len(rows) == size:
                break
            row = self.draw(rng)
            if row is None:
                continue
            key = self.key(row)
            if key_hash(key) in seen or is_held_out(key) != (side == "evaluation"):
                continue
            seen.add(key_hash(key))
            if self.is_wanted(row):
                rows.append(row)
        if len(rows) < size:
            raise ConfigError(
                f"{type(self).__name__} has too few different problems for {side}_size.",
                expected=f"at most about {len(rows)}",
                given=size,
                remedy=f"Lower {side}_size, or let its other arguments allow more problems.",
            )
        return rows

    def prompt(self, row: Row) -> str | list[Message]:
        """Return the problem in short form, or an instruction in chat form."""
        if self.prompt_format == "short":
            return self.short(row)
        return [{"role": "user", "content": self.instruction(row)}]
