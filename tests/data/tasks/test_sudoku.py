from collections import Counter
from itertools import permutations

import pytest

from lit_qrl.data.sources import read_rows
from lit_qrl.data.tasks import Sudoku
from lit_qrl.data.tasks.sudoku import solutions, solved_grids
from lit_qrl.errors import ConfigError
from lit_qrl.rewards import Sample, score_all
from lit_qrl.rewards.puzzles import is_solved
from tests.rewards.datasets import DATA

PUBLIC = str(DATA / "sudoku4x4.csv")


def test_all_solved_grids():
    grids = solved_grids()
    assert len(set(grids)) == 288
    by_brute_force = {
        "".join(map("".join, four))
        for four in permutations(list(permutations("1234")), 4)
        if all(len({row[c] for row in four}) == 4 for c in range(4)) and is_solved("".join(map("".join, four)))
    }
    assert set(grids) == by_brute_force


def test_solutions_of_the_public_puzzles():
    for row in read_rows(PUBLIC):
        found = solutions(row["Puzzle"], limit=None)
        assert row["Solution"] in found
        agree = [g for g in solved_grids() if all(p in ("0", d) for p, d in zip(row["Puzzle"], g, strict=True))]
        assert sorted(found) == agree


def test_puzzles_are_valid_unique_and_disjoint():
    task = Sudoku(train_size=600, evaluation_size=200)
    task.setup()
    train, evaluation = task.train_rows(), task.evaluation_rows()
    assert (len(train), len(evaluation)) == (600, 200)
    puzzles = [row["Puzzle"] for row in (*train, *evaluation)]
    assert len(set(puzzles)) == 800
    for row in (*train, *evaluation):
        assert row["Puzzle"].count("0") == 8
        assert solutions(row["Puzzle"]) == [row["Solution"]]


def test_evaluation_on_the_public_puzzles():
    task = Sudoku(train_size=100, evaluation_path=PUBLIC)
    task.setup()
    assert len(task.evaluation_rows()) == 40
    assert task.evaluation_rows()[1]["Puzzle"].startswith("0")


def test_prompts_and_scores():
    row = {"Puzzle": "1200341221434321", "Solution": "1234341221434321"}
    task = Sudoku()
    (message,) = task.prompt(row)
    assert message["role"] == "user"
    assert "1200\n3412\n2143\n4321" in message["content"]
    assert Sudoku(prompt_format="short").prompt(row) == "1200341221434321:"
    assert task.reference(row) == row["Solution"]
    samples = [Sample("", text, row["Solution"], row) for text in ("1234341221434321", "1233341221434321", "no")]
    assert score_all(task.rewards, samples).total == [1.0, 0.5, 0.0]
    assert task.is_correct(samples) == [True, False, False]


@pytest.mark.parametrize(
    "line",
    ["102200002100320,3142243142131324", "3102200002100320,1234341221434321", "x102200002100320,3142243142131324"],
)
def test_a_row_that_is_no_puzzle(tmp_path, line):
    (tmp_path / "a.csv").write_text(f"Puzzle,Solution\n{line}\n")
    with pytest.raises(ConfigError, match=r"Row 1 of .*not a problem of Sudoku"):
        Sudoku().read(str(tmp_path / "a.csv"))


def test_clues_are_spread_over_the_grid():
    task = Sudoku(train_size=2000, evaluation_size=100)
    task.setup()
    counts = Counter(i for row in task.train_rows() for i, digit in enumerate(row["Puzzle"]) if digit == "0")
    assert all(850 < counts[i] < 1150 for i in range(16))
