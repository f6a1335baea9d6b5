"""A column of numbers, added one by one: each running total is written out, and the last of them is the answer."""

import random
from typing import Any

from lit_qrl.data.sources import check_columns, read_rows
from lit_qrl.data.task import Row
from lit_qrl.data.tasks.generated import GeneratedTask
from lit_qrl.errors import ConfigError
from lit_qrl.rewards.simple import ExactMatchReward

CHARACTERS = "0123456789,:"
INSTRUCTION = (
    "Add these numbers one by one. Each is written with its lowest digit first; write every running total likewise, "
    "with {digits} digits and no carry beyond them, separated by commas. The last total is the answer.\n\n{numbers}"
)


def running_totals(numbers: str) -> str:
    """Return the totals of the first, the first two, … numbers, without the carry beyond the width of a number.

    Args:
        numbers: separated by commas, all of one width, lowest digit first.

    >>> running_totals("52,91,10")  # 25 + 19 + 1
    '52,44,54'
    """
    total, totals = 0, []
    for number in numbers.split(","):
        total = (total + int(number[::-1])) % 10 ** len(number)
        totals.append(str(total).zfill(len(number))[::-1])
    return ",".join(totals)


class LastTotalReward(ExactMatchReward):
    """Scores 1 where the text after the last comma is the reference, else 0: what stands before is the way there.

    >>> from lit_qrl.rewards.base import Sample
    >>> answers = ["52,44,54", "52,43,54", "52,44,53", "54,"]
    >>> LastTotalReward()([Sample("52,91,10:", answer, reference="54") for answer in answers])
    [1.0, 1.0, 0.0, 0.0]
    """

    def __init__(self, weight: float = 1.0, name: str = "last_total") -> None:
        super().__init__(weight, name)

    def _answer(self, completion: str) -> str:
        return completion.rpartition(",")[2].strip()


class ColumnSum(GeneratedTask):
    """Numbers drawn uniformly; the answer is their sum, reached over every running total.

    Args:
        numbers: of each problem, and totals of its answer.
        digits: of each number and total, the lowest first; what is carried beyond them is dropped.
        **kwargs: see `GeneratedTask`; rewards are by default `LastTotalReward`.

    >>> task = ColumnSum(numbers=3, digits=2)
    >>> task.prompt({"numbers": "52,91,10"}), task.reference({"numbers": "52,91,10"})
    ('52,91,10:', '54')
    """

    name = "column_sum"
    reward = LastTotalReward

    def __init__(self, numbers: int = 25, digits: int = 7, **kwargs) -> None:
        for what, value in (("numbers", numbers), ("digits", digits)):
            if value < 2:
                raise ConfigError(f"ColumnSum's {what} is too small.", expected="2 or more", given=value)
        super().__init__(**kwargs)
        self.numbers, self.digits = numbers, digits

    def draw(self, rng: random.Random) -> dict[str, Any]:
        return {"numbers": ",".join("".join(rng.choices("0123456789", k=self.digits)) for _ in range(self.numbers))}

    def key(self, row: Row) -> str:
        return row["numbers"]

    def read(self, path: str) -> list[dict[str, Any]]:
        rows = read_rows(path)
        check_columns(rows, ["numbers"], path)
        return [dict(row) for row in rows]

    def short(self, row: Row) -> str:
        """Return "52,91,10:"."""
        return f"{row['numbers']}:"

    def instruction(self, row: Row) -> str:
        return INSTRUCTION.format(digits=self.digits, numbers=row["numbers"])

    def reference(self, row: Row) -> str:
        """Return the last total."""
        return running_totals(row["numbers"]).rpartition(",")[2]
