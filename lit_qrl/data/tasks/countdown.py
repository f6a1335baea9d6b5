"""Countdown: reach a target with every given number exactly once and + − × ÷."""

import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import combinations, product
from pathlib import Path
from typing import Any, Literal

from lit_qrl.data.task import Row
from lit_qrl.data.tasks.generated import GeneratedTask
from lit_qrl.errors import ConfigError
from lit_qrl.rewards.puzzles import CountdownReward

INSTRUCTION = (
    "Using each of the numbers {numbers} exactly once, and only the operations + - * / and parentheses, write an "
    "expression that equals {target}. Think step by step, then give the expression alone inside <answer> and "
    "</answer>, for example <answer>(1 + 2) * 3</answer>."
)

# 3 numbers have about a hundred expressions, 4 a few thousand, 5 some hundred thousand.
MAX_NUMBERS = 5


def problem_key(numbers: Sequence[int], target: int) -> str:
    """Return what identifies a problem: its sorted numbers and its target.

    >>> problem_key([7, 3, 5], 22)
    '3,5,7=22'
    """
    return f"{','.join(map(str, sorted(numbers)))}={target}"


class Countdown(GeneratedTask):
    """Generated Countdown problems, every one of them solvable.

    Numbers are drawn uniformly from 1..max_number, the target uniformly from what they can reach in 1..max_target.
    No problem is both trained on and evaluated, under any seed, and none is in the public test set of 3-number
    Countdown used in the literature (128 published rows, known by their hashes), nor in the files of `exclude`.

    Args:
        count: numbers per problem.
        max_number: the largest number.
        max_target: the largest target.
        prompt_format: `short` is "3,5,7=22:", which the policy that ships understands; `chat` is an instruction for a
            chat model that asks for the expression in <answer> tags.
        **kwargs: see `GeneratedTask`; rewards are by default `CountdownReward`.
    """

    name = "countdown"
    reward = CountdownReward
    columns = {"input": 'numbers, such as "3,5,7"', "output": "their target, such as 22"}
    public_tests = Path(__file__).with_name("countdown_public_test.txt")

    def __init__(
        self,
        count: int = 3,
        max_number: int = 30,
        max_target: int = 30,
        *,
        prompt_format: Literal["short", "chat"] = "short",
        **kwargs,
    ) -> None:
        if not 2 <= count <= MAX_NUMBERS:
            raise ConfigError("Countdown's count is out of range.", expected=f"2 to {MAX_NUMBERS}", given=count)
        self.check_sizes(max_number=max_number, max_target=max_target)
        super().__init__(prompt_format=prompt_format, **kwargs)
        self.count, self.max_number, self.max_target = count, max_number, max_target

    def draw(self, rng: random.Random) -> dict[str, Any] | None:
        numbers = [rng.randint(1, self.max_number) for _ in range(self.count)]
        targets = reachable(tuple(sorted(numbers)), self.max_target)
        return {"numbers": numbers, "target": rng.choice(targets)} if targets else None

    def key(self, row: Row) -> str:
        return problem_key(row["numbers"], row["target"])

    def problem(self, row: Row) -> dict[str, Any]:
        numbers = [int(part) for part in str(row["input"]).split(",")]
        return {"numbers": numbers, "target": int(row["output"])}

    def short(self, row: Row) -> str:
        """Return "3,5,7=22:", the numbers in the row's order."""
        return f"{','.join(map(str, row['numbers']))}={row['target']}:"

    def instruction(self, row: Row) -> str:
        return INSTRUCTION.format(numbers=", ".join(map(str, row["numbers"])), target=row["target"])

    def reference(self, row: Row) -> int:
        """Return the target."""
        return row["target"]


def splits(numbers: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield every way to part the numbers in two, each once: the first number is always on the left."""
    positions = range(1, len(numbers))
    for size in range(len(positions)):
        for chosen in combinations(positions, size):
            yield tuple(numbers[i] for i in (0, *chosen)), tuple(numbers[i] for i in positions if i not in chosen)


@lru_cache(maxsize=1 << 16)
def _values(numbers: tuple[int, ...]) -> frozenset[tuple[int, int]]:
    """All reachable values as (numerator, denominator), not reduced: ten times faster than fractions."""
    if len(numbers) == 1:
        return frozenset({(numbers[0], 1)})
    found: set[tuple[int, int]] = set()
    for some, rest in splits(numbers):
        for (p, q), (r, s) in product(_values(some), _values(rest)):
            found |= {(p * s + r * q, q * s), (p * s - r * q, q * s), (r * q - p * s, q * s), (p * r, q * s)}
            if r:
                found.add((p * s, q * r))
            if p:
                found.add((r * q, s * p))
    return frozenset(found)


@lru_cache(maxsize=1 << 16)
def reachable(numbers: tuple[int, ...], max_target: int) -> tuple[int, ...]:
    """Return the integers in 1..max_target that the sorted `numbers` can make, ascending.

    Args:
        numbers: positive integers, ascending.
        max_target: the largest target of interest.

    >>> reachable((2, 3), 10)
    (1, 5, 6)
    """
    whole = {p // q for p, q in _values(numbers) if p % q == 0}
    return tuple(sorted(value for value in whole if 1 <= value <= max_target))
