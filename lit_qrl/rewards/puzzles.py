"""The rewards of puzzles whose answers are checked by their rules: Countdown and Sudoku."""

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate
from math import isqrt
from typing import Any

from lit_qrl.rewards.base import Reward, Sample
from lit_qrl.rewards.math.reward import tagged_or_whole

MAX_CHARACTERS = 200
"""Six numbers of four digits with all operators and brackets take under 60."""
MAX_NESTING = 20
MAX_DIGITS = 9
_ARITHMETIC = re.compile(rf"(?:\s*(?:[0-9]{{1,{MAX_DIGITS}}}(?![0-9])|[-+*/()]))+")
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_SPELLINGS = str.maketrans({"×": "*", "÷": "/", "−": "-", "·": "*"})


def evaluate(expression: str) -> tuple[Fraction, list[int]] | None:
    """Return the exact value of an arithmetic expression and the numbers in it, or None when it is not one.

    Only whole numbers, `+ - * /` between two operands, and brackets: no sign before a number, no powers, no names.
    Python parses it, and evaluates nothing.

    >>> evaluate("(1 + 2) / 4")
    (Fraction(3, 4), [1, 2, 4])
    >>> evaluate("1/0"), evaluate("-1"), evaluate("2**3"), evaluate("1 2")
    (None, None, None, None)
    """
    text = expression.strip()
    if len(expression) > MAX_CHARACTERS or not _ARITHMETIC.fullmatch(text):
        return None
    if max(accumulate((one == "(") - (one == ")") for one in text)) > MAX_NESTING:
        return None
    numbers: list[int] = []

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=int(number)):
                numbers.append(number)
                return Fraction(number)
            case ast.BinOp(left, symbol, right) if type(symbol) in _OPERATORS:
                return _OPERATORS[type(symbol)](value(left), value(right))
        raise SyntaxError("no arithmetic")

    plain = re.sub(r"(?<![0-9])0+(?=[0-9])|\s", " ", text)  # Python has no leading zeros
    try:
        return value(ast.parse(plain.strip(), mode="eval").body), numbers
    except (SyntaxError, ZeroDivisionError):
        return None


class CountdownReward(Reward):
    """Scores 1 for an expression that uses every given number exactly once and equals the target, else 0.

    The expression is the inside of the last `<answer>…</answer>`, else the whole completion; `= target` after it is
    allowed. Arithmetic is exact.

    Args:
        weight: factor in the sum of rewards.
        partial: score of a well-formed expression that uses the right numbers but has another value.
        numbers_column: column with the given numbers: a list, or text with commas.
        target_column: column with the target.
        name: of the metric.

    >>> rows = {"numbers": [3, 5, 7], "target": 22}
    >>> reward = CountdownReward(partial=0.1)
    >>> reward([Sample("", "3*5+7", columns=rows), Sample("", "3+5+7", columns=rows), Sample("", "22", columns=rows)])
    [1.0, 0.1, 0.0]
    """

    batched = False
    time_limit = None

    def __init__(
        self,
        weight: float = 1.0,
        partial: float = 0.0,
        numbers_column: str = "numbers",
        target_column: str = "target",
        name: str = "countdown",
    ) -> None:
        self.weight, self.partial, self.name = weight, partial, name
        self.numbers_column, self.target_column = numbers_column, target_column

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> float:
        numbers = given_numbers(sample.columns[self.numbers_column])
        target = Fraction(str(sample.columns[self.target_column]))
        result = self.parse(sample.completion, target)
        if result is None or Counter(result[1]) != Counter(numbers):
            return 0.0
        return 1.0 if result[0] == target else self.partial

    @staticmethod
    def parse(completion: str, target: Fraction) -> tuple[Fraction, list[int]] | None:
        """Return the value and the numbers of a completion's expression, or None."""
        expression, equals, stated = tagged_or_whole(completion).translate(_SPELLINGS).partition("=")
        if equals and (not re.fullmatch(rf"\s*[0-9]{{1,{MAX_DIGITS}}}\s*", stated) or int(stated) != target):
            return None
        return evaluate(expression)


def given_numbers(given: Any) -> list[int]:
    """Return the numbers of a row.

    >>> given_numbers("3,5,7") == given_numbers([3, 5, 7])
    True
    """
    return [int(number) for number in (given.split(",") if isinstance(given, str) else given)]


MAX_GRID = 2000
"""A 9×9 grid drawn with borders takes under 700."""


def read_grid(text: str, size: int = 4) -> str | None:
    r"""Return the digits of a grid, row by row, or None when a text is no grid.

    White space, commas and lines of a drawing may stand between the digits; any other character makes it no grid.

    >>> read_grid("12 34\n34 12\n21 43\n43 21")
    '1234341221434321'
    >>> read_grid("the answer is 1") is None
    True
    """
    if len(text) > MAX_GRID:
        return None
    digits = re.sub(r"[\s,;|+\-\[\]]", "", text)
    return digits if re.fullmatch(rf"[1-{size}]{{{size * size}}}", digits) else None


def is_solved(grid: str) -> bool:
    """Return whether every row, column and box of a full grid has each digit once.

    >>> is_solved("1234341221434321"), is_solved("1234123412341234")
    (True, False)
    """
    size = isqrt(len(grid))
    box = isqrt(size)
    rows = [[(r, c) for c in range(size)] for r in range(size)]
    columns = [[(r, c) for r in range(size)] for c in range(size)]
    boxes = [
        [(r + i, c + j) for i in range(box) for j in range(box)]
        for r in range(0, size, box)
        for c in range(0, size, box)
    ]
    return all(len({grid[r * size + c] for r, c in unit}) == size for unit in rows + columns + boxes)


class SudokuReward(Reward):
    """Scores a filled-in grid: 1 when solved, else the fraction of empty cells that are right.

    The grid is the inside of the last `<answer>…</answer>`, else the whole completion. Changing a given cell scores 0.
    A grid that obeys all rules is solved, even if it differs from the stored solution (a puzzle with several).

    Args:
        partial_credit: False scores only solved grids.
        weight: factor in the sum of rewards.
        puzzle_column: column with the puzzle's digits, row by row, 0 for empty.
        solution_column: column with the solution's digits.
        name: of the metric.

    >>> columns = {"Puzzle": "1200341221434321", "Solution": "1234341221434321"}
    >>> answers = ["1234 3412 2143 4321", "1233 3412 2143 4321", "2134 3412 2143 4321"]
    >>> SudokuReward()([Sample("", answer, columns=columns) for answer in answers])
    [1.0, 0.5, 0.0]
    """

    batched = False
    time_limit = None

    def __init__(
        self,
        partial_credit: bool = True,
        weight: float = 1.0,
        puzzle_column: str = "Puzzle",
        solution_column: str = "Solution",
        name: str = "sudoku",
    ) -> None:
        self.partial_credit, self.weight, self.name = partial_credit, weight, name
        self.puzzle_column, self.solution_column = puzzle_column, solution_column

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> float:
        solution = str(sample.columns[self.solution_column])
        puzzle = str(sample.columns[self.puzzle_column])
        size = isqrt(len(solution))
        if len(puzzle) != len(solution) or size * size != len(solution):
            raise ValueError(
                "A Sudoku row is not a puzzle and its solution. Expected: as many digits in both, a square number. "
                f"Given: {puzzle!r} and {solution!r}. Keep the columns as text, since numbers lose leading zeros."
            )
        grid = read_grid(tagged_or_whole(sample.completion), size)
        if grid is None or any(given not in ("0", cell) for given, cell in zip(puzzle, grid, strict=True)):
            return 0.0
        if is_solved(grid):
            return 1.0
        empty = [i for i, given in enumerate(puzzle) if given == "0"]
        right = sum(grid[i] == solution[i] for i in empty)
        return right / len(empty) if self.partial_credit and right < len(empty) else 0.0
