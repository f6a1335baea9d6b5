import pytest

from lit_qrl.rewards import Sample, SudokuReward
from lit_qrl.rewards.puzzles import is_solved, read_grid

PUZZLE, SOLUTION = "3102200002100320", "3142243142131324"
NINE = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"


def score(completion, puzzle=PUZZLE, solution=SOLUTION, **options):
    return SudokuReward(**options)([Sample("", completion, None, {"Puzzle": puzzle, "Solution": solution})])[0]


@pytest.mark.parametrize(
    "completion",
    [
        SOLUTION,
        "3142\n2431\n4213\n1324",
        "3 1 | 4 2\n2 4 | 3 1\n----+----\n4 2 | 1 3\n1 3 | 2 4",
        "[[3,1,4,2],[2,4,3,1],[4,2,1,3],[1,3,2,4]]",
        f"thinking 1234 <answer>\n{SOLUTION}\n</answer>",
    ],
)
def test_solved(completion):
    assert score(completion) == 1.0
    assert score(completion, partial_credit=False) == 1.0


@pytest.mark.parametrize(
    "completion",
    ["", "no", PUZZLE, SOLUTION[:-1], SOLUTION + "1", "1" + SOLUTION[1:], "1" * 100_000, f"{SOLUTION} is it", "٣" * 16,
     SOLUTION.replace("4", "5"), f"<answer>{SOLUTION}", "<answer></answer>", "\x00" * 16],
)  # fmt: skip
def test_no_grid_or_changed_givens_score_zero(completion):
    assert score(completion) == 0.0


def test_partial_credit_is_the_fraction_of_empty_cells_that_are_right():
    empty = [i for i, given in enumerate(PUZZLE) if given == "0"]
    for wrong in range(1, len(empty) + 1):
        grid = list(SOLUTION)
        for i in empty[:wrong]:
            grid[i] = "1" if SOLUTION[i] != "1" else "2"
        text = "".join(grid)
        assert score(text) == pytest.approx((len(empty) - wrong) / len(empty))
        assert score(text, partial_credit=False) == 0.0


def test_another_solution_of_an_ambiguous_puzzle_is_solved():
    other = "1234341221434321"
    assert is_solved(other)
    assert score(other, "0" * 16) == 1.0


def test_nine_by_nine():
    puzzle = "0" * 10 + NINE[10:]
    assert score(NINE, puzzle, NINE) == 1.0
    assert score(NINE[1] + NINE[0] + NINE[2:], puzzle, NINE) == pytest.approx(0.8)
    assert read_grid(NINE, 9) == NINE


def test_a_row_that_is_no_puzzle_is_an_error():
    with pytest.raises(ValueError, match="leading zeros"):
        score(SOLUTION, "102200002100320")
    with pytest.raises(ValueError, match="square number"):
        score(SOLUTION, "123", "123")


def test_columns_can_be_named():
    reward = SudokuReward(puzzle_column="p", solution_column="s")
    assert reward([Sample("", SOLUTION, None, {"p": PUZZLE, "s": SOLUTION})]) == [1.0]
