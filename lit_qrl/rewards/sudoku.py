"""The reward of a 4×4 or 9×9 Sudoku."""

import re
from collections.abc import Sequence
from math import isqrt

from lit_qrl.rewards.base import Reward, Sample
from lit_qrl.rewards.math.answers import last_tagged

MAX_CHARACTERS = 2000
"""A 9×9 grid drawn with borders takes under 700."""


def read_grid(text: str, size: int = 4) -> str | None:
    r"""Return the digits of a grid, row by row, or None when a text is no grid.

    White space, commas and lines of a drawing may stand between the digits; any other character makes it no grid.

    >>> read_grid("12 34\n34 12\n21 43\n43 21")
    '1234341221434321'
    >>> read_grid("the answer is 1") is None
    True
    """
    if len(text) > MAX_CHARACTERS:
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
        tagged = last_tagged(sample.completion)
        grid = read_grid(sample.completion if tagged is None else tagged, size)
        if grid is None or any(given not in ("0", cell) for given, cell in zip(puzzle, grid, strict=True)):
            return 0.0
        if is_solved(grid):
            return 1.0
        empty = [i for i, given in enumerate(puzzle) if given == "0"]
        right = sum(grid[i] == solution[i] for i in empty)
        return right / len(empty) if self.partial_credit and right < len(empty) else 0.0
