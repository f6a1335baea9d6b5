"""4×4 Sudoku with generated puzzles."""

import hashlib
import itertools
import random
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from lit_qrl.data.sources import check_columns, read_rows
from lit_qrl.data.task import Message, Row, Task
from lit_qrl.errors import ConfigError
from lit_qrl.rewards.base import Reward, Sample, check_names, score_all
from lit_qrl.rewards.sudoku import SudokuReward

CELLS = 16

# One puzzle in eight is held out, by hash and not by draw, so that no seed trains on what another seed evaluates.
HELD_OUT_EVERY = 8

# Draws per wanted puzzle before the space counts as exhausted.
MAX_DRAWS_PER_PUZZLE = 200

PUBLIC_TEST_HASHES = Path(__file__).with_name("sudoku_public_test.txt")

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
    return tuple(solutions("0" * CELLS, limit=None))


def solutions(puzzle: str, limit: int | None = 2) -> list[str]:
    """Return the solutions of a puzzle (0 for empty), at most `limit` of them.

    >>> solutions("1234341221434320"), len(solutions("0" * 16, limit=None))
    (['1234341221434321'], 288)
    """
    return list(itertools.islice(_solve(puzzle), limit))


def _solve(grid: str) -> Iterable[str]:
    empty = grid.find("0")
    if empty < 0:
        yield grid
        return
    taken = {grid[other] for other in _peers(empty)}
    for digit in "1234":
        if digit not in taken:
            yield from _solve(grid[:empty] + digit + grid[empty + 1 :])


@cache
def _peers(cell: int) -> tuple[int, ...]:
    """Return the cells of the same row, column and box."""

    def shares(other: int) -> bool:
        (row, column), (r, c) = divmod(cell, 4), divmod(other, 4)
        return row == r or column == c or (row // 2, column // 2) == (r // 2, c // 2)

    return tuple(other for other in range(CELLS) if other != cell and shares(other))


def puzzle_hash(puzzle: str) -> str:
    """Return 64 bits of BLAKE2b of a puzzle, as 16 hexadecimal digits.

    >>> puzzle_hash("3102200002100320") in PUBLIC_TEST_HASHES.read_text()
    True
    """
    return hashlib.blake2b(puzzle.encode(), digest_size=8).hexdigest()


def read_puzzles(path: str) -> list[dict[str, Any]]:
    """Return the rows of a file with the columns `Puzzle` and `Solution`, 16 digits each.

    Raises:
        ConfigError: the file or a column is missing, or a row is not a puzzle with its solution.
    """
    rows = read_rows(path)
    check_columns(rows, ["Puzzle", "Solution"], path)
    for number, row in enumerate(rows, start=1):
        puzzle, solution = str(row["Puzzle"]), str(row["Solution"])
        if len(puzzle) != CELLS or set(puzzle) - set("01234") or solution not in solutions(puzzle, limit=None):
            raise ConfigError(
                f"Row {number} of {path!r} is not a 4x4 Sudoku with its solution.",
                expected="16 digits 0 to 4, and 16 digits 1 to 4 that solve them",
                given=f"{puzzle}, {solution}",
                remedy="Keep the columns as text, since numbers lose leading zeros.",
            )
    return rows


class Sudoku(Task):
    """Generated 4×4 Sudoku puzzles, each with its solution.

    Solved grids are drawn uniformly from all 288, then cells are emptied at random. No puzzle is both trained on and
    evaluated, under any seed, and none is among the published test puzzles (250 of them, known by their hashes) or in
    the files of `exclude`. Puzzles of both sides do share solved grids: there are only 288.

    Args:
        empty: number of empty cells.
        unique: only puzzles with one solution; the published ones have up to three.
        train_size: different puzzles to train on.
        evaluation_size: different held-out puzzles.
        prompt_format: `short` is the 16 digits and a colon; `chat` an instruction that asks for <answer> tags.
        exclude: files with a column `Puzzle`, whose puzzles are left out on both sides.
        evaluation_path: such a file to evaluate on instead of generated puzzles.
        rewards: what is learned from; by default `SudokuReward`. A puzzle counts as solved when every cell is right.
        seed: of the draw.
    """

    name = "sudoku"

    def __init__(
        self,
        empty: int = 8,
        unique: bool = True,
        train_size: int = 8192,
        evaluation_size: int = 500,
        prompt_format: Literal["short", "chat"] = "chat",
        exclude: list[str] | None = None,
        evaluation_path: str | None = None,
        rewards: list[Reward] | None = None,
        seed: int = 0,
    ) -> None:
        if not 1 <= empty <= CELLS - 4:
            raise ConfigError("Sudoku's empty is out of range.", expected=f"1 to {CELLS - 4} cells", given=empty)
        for what, value in {"train_size": train_size, "evaluation_size": evaluation_size}.items():
            if value < 1:
                raise ConfigError(f"Sudoku's {what} is too small.", expected="1 or more", given=value)
        if prompt_format not in ("short", "chat"):
            raise ConfigError("Sudoku's prompt_format is unknown.", expected="short or chat", given=repr(prompt_format))
        self.empty, self.unique, self.seed = empty, unique, seed
        self.train_size, self.evaluation_size = train_size, evaluation_size
        self.prompt_format, self.evaluation_path, self.exclude = prompt_format, evaluation_path, list(exclude or [])
        self.rewards = [SudokuReward()] if rewards is None else list(rewards)
        check_names(self.rewards)
        self._correct = SudokuReward(partial_credit=False)
        self._train: list[dict[str, Any]] = []
        self._evaluation: list[dict[str, Any]] = []

    def setup(self) -> None:
        if self._train:
            return
        excluded = set(PUBLIC_TEST_HASHES.read_text(encoding="utf-8").split())
        excluded |= {puzzle_hash(row["Puzzle"]) for path in self.exclude for row in read_puzzles(path)}
        if self.evaluation_path is None:
            evaluation = self._draw(self.evaluation_size, excluded, held_out=True)
        else:
            evaluation = read_puzzles(self.evaluation_path)[: self.evaluation_size]
            excluded |= {puzzle_hash(row["Puzzle"]) for row in evaluation}
        self._train, self._evaluation = self._draw(self.train_size, excluded, held_out=False), evaluation

    def _draw(self, size: int, excluded: set[str], *, held_out: bool) -> list[dict[str, Any]]:
        # One generator per side: the evaluation set does not depend on train_size, nor the reverse.
        rng = random.Random(f"sudoku {self.seed} {'evaluation' if held_out else 'train'}")
        rows: list[dict[str, Any]] = []
        seen = set(excluded)
        for _ in range(size * MAX_DRAWS_PER_PUZZLE):
            if len(rows) == size:
                return rows
            solution = rng.choice(solved_grids())
            emptied = set(rng.sample(range(CELLS), self.empty))
            puzzle = "".join("0" if i in emptied else digit for i, digit in enumerate(solution))
            key = puzzle_hash(puzzle)
            if key in seen or (int(key, 16) % HELD_OUT_EVERY == 0) != held_out:
                continue
            seen.add(key)
            if not self.unique or len(solutions(puzzle)) == 1:
                rows.append({"Puzzle": puzzle, "Solution": solution})
        what = "evaluation_size" if held_out else "train_size"
        if len(rows) < size:
            raise ConfigError(
                f"There are too few Sudoku puzzles with {self.empty} empty cells for {what}.",
                expected=f"at most about {len(rows)}",
                given=size,
                remedy=f"Lower {what}, change empty, or set unique to false.",
            )
        return rows

    def train_rows(self) -> Sequence[Row]:
        self.setup()
        return self._train

    def evaluation_rows(self) -> Sequence[Row]:
        self.setup()
        return self._evaluation

    def prompt(self, row: Row) -> str | list[Message]:
        """Return the puzzle's digits with a colon, or an instruction in chat form."""
        if self.prompt_format == "short":
            return f"{row['Puzzle']}:"
        grid = "\n".join(row["Puzzle"][i : i + 4] for i in range(0, CELLS, 4))
        return [{"role": "user", "content": INSTRUCTION.format(grid=grid)}]

    def reference(self, row: Row) -> str:
        """Return the solution's digits."""
        return row["Solution"]

    def is_correct(self, samples: Sequence[Sample]) -> list[bool]:
        scores = score_all([self._correct], samples).parts[self._correct.name]  # one bad sample fails alone
        return [score >= 1.0 for score in scores]
