"""Prefix sums: digits in, their running sums modulo 10 out. A task that a small policy can learn to the last answer."""

import random
from collections.abc import Iterable
from itertools import accumulate
from typing import Any, Literal

from lit_qrl.data.task import Row
from lit_qrl.data.tasks.generated import GeneratedTask
from lit_qrl.errors import ConfigError
from lit_qrl.rewards.simple import ExactMatchReward

INSTRUCTION = (
    "Write the running sums of these digits, each modulo 10: the n-th digit of the answer is the last digit of the sum "
    "of the first n digits. Think step by step, then give the {count} digits alone inside <answer> and "
    "</answer>.\n\n{digits}"
)


def running_sums(digits: Iterable[str]) -> str:
    """Return the sums of the first, the first two, … digits, each modulo 10.

    >>> running_sums("31415")
    '34894'
    """
    return "".join(str(total % 10) for total in accumulate(map(int, digits)))


class PrefixSum(GeneratedTask):
    """Digits drawn uniformly; the answer is their running sums modulo 10, and counts when every digit of it is right.

    Each digit of the answer is one addition away from the one before, so the task can be perfected, and one wrong digit
    spoils the rest: what a low-precision sampler gets wrong shows.

    Args:
        digits: of each problem, and of its answer.
        prompt_format: `short` is "31415:", which `models/tiny-prefix-sum` understands; `chat` is an instruction for a
            chat model that asks for the digits in <answer> tags.
        **kwargs: see `GeneratedTask`; rewards are by default `ExactMatchReward`.

    >>> task = PrefixSum(digits=5)
    >>> task.prompt({"digits": "31415"}), task.reference({"digits": "31415"})
    ('31415:', '34894')
    """

    name = "prefix_sum"
    reward = ExactMatchReward
    columns = {"digits": "text of digits 0 to 9"}

    def __init__(self, digits: int = 16, *, prompt_format: Literal["short", "chat"] = "short", **kwargs) -> None:
        if digits < 2:
            raise ConfigError("PrefixSum's digits is too small.", expected="2 or more", given=digits)
        super().__init__(prompt_format=prompt_format, **kwargs)
        self.digits = digits

    def draw(self, rng: random.Random) -> dict[str, Any]:
        return {"digits": "".join(rng.choices("0123456789", k=self.digits))}

    def key(self, row: Row) -> str:
        return row["digits"]

    def problem(self, row: Row) -> dict[str, Any]:
        if not isinstance(row["digits"], str) or not row["digits"].isdecimal() or not row["digits"].isascii():
            raise ValueError(row["digits"])
        return dict(row)

    def short(self, row: Row) -> str:
        """Return "31415:"."""
        return f"{row['digits']}:"

    def instruction(self, row: Row) -> str:
        return INSTRUCTION.format(count=len(row["digits"]), digits=" ".join(row["digits"]))

    def reference(self, row: Row) -> str:
        """Return the running sums."""
        return running_sums(row["digits"])
