"""4×4 Sudoku with generated puzzles."""

import random
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from itertools import permutations, product
from pathlib import Path
from typing import Any, Literal

from lit_qrl.data.task import Row
from lit_qrl.data.tasks.generated import GeneratedTask
from lit_qrl.errors import ConfigError
from lit_qrl.rewards.puzzles import SudokuReward, is_solved

CELLS = 16

INSTRUCTION = (
    "Solve this 4x4 Sudoku. Replace every 0 so that each row, each column and each of the four 2x2 boxes contains the "
    "digits 1 to 4 exactly once; the other digits stay. Think step by step, then give the 16 digits of the solved grid "
    "row by row inside <answer> and </answer>.\n\n{grid}"
)


@cache
def solved_grids() -> tuple[str, ...]:
    """Return all 288 solved 4×4 grids as 16 digits each, in order.

    >>> len(solved_grids()), solved_grids()[0]
    (288, '1234341221434321')
    """
    rows = ["".join(row) for row in permutations("1234")]
    halves = [one + other for one, other in product(rows, repeat=2) if len({*one[:2], *other[:2]}) == 4]
    return tuple(upper + lower for upper, lower in product(halves, repeat=2) if is_solved(upper + lower))


def solutions(puzzle: str, limit: int | None = 2) -> list[str]:
    """Return the solutions of a puzzle (0 for empty), at most `limit` of them.

    >>> solutions("1234341221434320"), len(solutions("0" * 16, limit=None))
    (['1234341221434321'], 288)
    """
    given = [_holding()[cell] for cell in enumerate(puzzle) if cell[1] != "0"]
    return [solved_grids()[number] for number in sorted(set(range(len(solved_grids()))).intersection(*given))][:limit]


@cache
def _holding() -> Mapping[tuple[int, str], set[int]]:
    """Return by cell and digit the numbers of the solved grids that have it there."""
    found = defaultdict[tuple[int, str], set[int]](set)
    for number, grid in enumerate(solved_grids()):
        for cell in enumerate(grid):
            found[cell].add(number)
    return found


class Sudoku(GeneratedTask):
    """Generated 4×4 Sudoku puzzles, each with its solution.

    Solved grids are drawn uniformly from all 288, then cells are emptied at random. No puzzle is both trained on and
    evaluated, under any seed, and none is among the published test puzzles (250 of them, known by their hashes) or in
    the files of `exclude`. Puzzles of both sides do share solved grids: there are only 288. A puzzle counts as solved
    when every cell is right.

    Args:
        empty: number of empty cells.
        unique: only puzzles with one solution; the published ones have up to three.
        prompt_format: `short` is the 16 digits and a colon; `chat` an instruction that asks for <answer> tags.
        **kwargs: see `GeneratedTask`; rewards are by default `SudokuReward`.
    """

    name = "sudoku"
    reward = SudokuReward
    columns = {"Puzzle": "16 digits 0 to 4", "Solution": "16 digits 1 to 4 that solve them"}
    public_tests = Path(__file__).with_name("sudoku_public_test.txt")

    def __init__(
        self, empty: int = 8, unique: bool = True, *, prompt_format: Literal["short", "chat"] = "chat", **kwargs
    ) -> None:
        if not 1 <= empty <= CELLS - 4:
            raise ConfigError("Sudoku's empty is out of range.", expected=f"1 to {CELLS - 4} cells", given=empty)
        super().__init__(prompt_format=prompt_format, **kwargs)
        self.empty, self.unique = empty, unique

    def draw(self, rng: random.Random) -> dict[str, Any]:
        solution = rng.choice(solved_grids())
        emptied = set(rng.sample(range(CELLS), self.empty))
        return {"Puzzle": "".join("0" if i in emptied else d for i, d in enumerate(solution)), "Solution": solution}

    def is_wanted(self, row: Row) -> bool:
        return not self.unique or len(solutions(row["Puzzle"])) == 1

    def key(self, row: Row) -> str:
        return row["Puzzle"]

    def problem(self, row: Row) -> dict[str, Any]:
        puzzle, solution = str(row["Puzzle"]), str(row["Solution"])
        if len(puzzle) != CELLS or set(puzzle) - set("01234") or solution not in solutions(puzzle, limit=None):
            raise ValueError(puzzle)
        return dict(row)

    def short(self, row: Row) -> str:
        return f"{row['Puzzle']}:"

    def instruction(self, row: Row) -> str:
        return INSTRUCTION.format(grid="\n".join(row["Puzzle"][i : i + 4] for i in range(0, CELLS, 4)))

    def reference(self, row: Row) -> str:
        """Return the solution's digits."""
        return row["Solution"]
