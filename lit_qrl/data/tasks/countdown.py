"""Countdown: reach a target with every given number exactly once and + − × ÷."""

import hashlib
import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from lit_qrl.data.task import Message, Row, Task
from lit_qrl.data.tasks.countdown_solver import MAX_NUMBERS, reachable
from lit_qrl.errors import ConfigError
from lit_qrl.rewards.base import Reward, Sample
from lit_qrl.rewards.countdown import CountdownReward

# One problem in eight is held out. By hash and not by draw, so that no seed trains on what another seed evaluates,
# and the policy that ships, which saw the other seven, can be evaluated under every seed.
HELD_OUT_EVERY = 8

# Draws per wanted problem before the space counts as exhausted; the last of 10,000 problems needs about 10.
MAX_DRAWS_PER_PROBLEM = 200

PUBLIC_TEST_HASHES = Path(__file__).with_name("countdown_public_test.txt")

INSTRUCTION = (
    "Using each of the numbers {numbers} exactly once, and only the operations + - * / and parentheses, write an "
    "expression that equals {target}. Think step by step, then give the expression alone inside <answer> and "
    "</answer>, for example <answer>(1 + 2) * 3</answer>."
)


def problem_key(numbers: Sequence[int], target: int) -> str:
    """Return what identifies a problem: its sorted numbers and its target.

    >>> problem_key([7, 3, 5], 22)
    '3,5,7=22'
    """
    return f"{','.join(map(str, sorted(numbers)))}={target}"


def key_hash(key: str) -> str:
    """Return 64 bits of BLAKE2b of a problem key, as 16 hexadecimal digits.

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
def public_test_hashes() -> frozenset[str]:
    """Return the hashes of the keys of the public test problems."""
    return frozenset(PUBLIC_TEST_HASHES.read_text(encoding="utf-8").split())


def read_problems(path: str) -> list[dict[str, Any]]:
    """Return the rows of a JSONL file with `input` ("a,b,c") and `output` (the target).

    Raises:
        ConfigError: the file is missing, or a line is not such a row.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(
            "A Countdown file is missing.", expected="a JSONL file", given=str(file), remedy="Correct the path."
        )
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            numbers = [int(part) for part in str(record["input"]).split(",")]
            rows.append({"numbers": numbers, "target": int(record["output"])})
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"Line {number} of {file} is not a Countdown problem.",
                expected='{"input": "3,5,7", "output": "22"}',
                given=line[:100],
                remedy="Correct the file, or name another.",
            ) from error
    return rows


class Countdown(Task):
    """Generated Countdown problems, every one of them solvable.

    Numbers are drawn uniformly from 1..max_number, the target uniformly from what they can reach in 1..max_target.
    No problem is both trained on and evaluated, under any seed, and none is in the public test set of 3-number
    Countdown used in the literature (128 published rows, known by their hashes), nor in the files of `exclude`.

    Args:
        count: numbers per problem.
        max_number: the largest number.
        max_target: the largest target.
        train_size: different problems to train on.
        evaluation_size: different held-out problems.
        prompt_format: `short` is "3,5,7=22:", which the policy that ships understands; `chat` is an instruction for a
            chat model that asks for the expression in <answer> tags.
        exclude: JSONL files (`input` "a,b,c", `output` target) whose problems are left out on both sides.
        evaluation_path: a JSONL file of that form to evaluate on instead of generated problems.
        rewards: what is learned from; by default `CountdownReward`, which also decides what counts as correct.
        seed: of the draw.
    """

    name = "countdown"

    def __init__(
        self,
        count: int = 3,
        max_number: int = 30,
        max_target: int = 30,
        train_size: int = 8192,
        evaluation_size: int = 500,
        prompt_format: Literal["short", "chat"] = "short",
        exclude: list[str] | None = None,
        evaluation_path: str | None = None,
        rewards: list[Reward] | None = None,
        seed: int = 0,
    ) -> None:
        if not 2 <= count <= MAX_NUMBERS:
            raise ConfigError("Countdown's count is out of range.", expected=f"2 to {MAX_NUMBERS}", given=count)
        sizes = {"max_number": max_number, "max_target": max_target, "train_size": train_size}
        for what, value in {**sizes, "evaluation_size": evaluation_size}.items():
            if value < 1:
                raise ConfigError(f"Countdown's {what} is too small.", expected="1 or more", given=value)
        if prompt_format not in ("short", "chat"):
            raise ConfigError(
                "Countdown's prompt_format is unknown.", expected="short or chat", given=repr(prompt_format)
            )
        self.count, self.max_number, self.max_target = count, max_number, max_target
        self.train_size, self.evaluation_size = train_size, evaluation_size
        self.prompt_format, self.evaluation_path, self.seed = prompt_format, evaluation_path, seed
        self.exclude = list(exclude or [])
        self._correct = CountdownReward()
        self.rewards = [CountdownReward()] if rewards is None else rewards
        self._train: list[dict[str, Any]] = []
        self._evaluation: list[dict[str, Any]] = []

    def setup(self) -> None:
        if self._train:
            return
        excluded = {problem_key(row["numbers"], row["target"]) for path in self.exclude for row in read_problems(path)}
        evaluation: list[dict[str, Any]]
        if self.evaluation_path is None:
            evaluation = self._draw(self.evaluation_size, excluded, held_out=True)
        else:
            evaluation = read_problems(self.evaluation_path)[: self.evaluation_size]
            excluded |= {problem_key(row["numbers"], row["target"]) for row in evaluation}
        self._train, self._evaluation = self._draw(self.train_size, excluded, held_out=False), evaluation

    def _draw(self, size: int, excluded: set[str], *, held_out: bool) -> list[dict[str, Any]]:
        # One generator per side: the evaluation set does not depend on train_size, nor the reverse.
        rng = random.Random(f"countdown {self.seed} {'evaluation' if held_out else 'train'}")
        rows: list[dict[str, Any]] = []
        seen = set(excluded)
        for _ in range(size * MAX_DRAWS_PER_PROBLEM):
            if len(rows) == size:
                break
            numbers = [rng.randint(1, self.max_number) for _ in range(self.count)]
            targets = reachable(tuple(sorted(numbers)), self.max_target)
            if not targets:
                continue
            target = rng.choice(targets)
            key = problem_key(numbers, target)
            if key in seen or is_held_out(key) != held_out:
                continue
            seen.add(key)
            if key_hash(key) not in public_test_hashes():
                rows.append({"numbers": numbers, "target": target})
        if len(rows) < size:
            what = "evaluation_size" if held_out else "train_size"
            raise ConfigError(
                f"There are too few Countdown problems with numbers up to {self.max_number} and targets up to "
                f"{self.max_target} for {what}.",
                expected=f"at most about {len(rows)}",
                given=size,
                remedy=f"Lower {what}, or raise max_number or max_target.",
            )
        return rows

    def train_rows(self) -> Sequence[Row]:
        self.setup()
        return self._train

    def evaluation_rows(self) -> Sequence[Row]:
        self.setup()
        return self._evaluation

    def prompt(self, row: Row) -> str | list[Message]:
        """Return "3,5,7=22:" or an instruction in chat form, the numbers in the row's order."""
        if self.prompt_format == "short":
            return f"{','.join(map(str, row['numbers']))}={row['target']}:"
        content = INSTRUCTION.format(numbers=", ".join(map(str, row["numbers"])), target=row["target"])
        return [{"role": "user", "content": content}]

    def reference(self, row: Row) -> int:
        """Return the target."""
        return row["target"]

    def is_correct(self, samples: Sequence[Sample]) -> list[bool]:
        return [score == 1.0 for score in self._correct(samples)]
