import itertools
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_qrl.rewards import CountdownReward, Sample
from lit_qrl.rewards.puzzles import evaluate
from tests.rewards.datasets import rows


def score(completion, numbers=(3, 5, 7), target=22, **options):
    return CountdownReward(**options)([Sample("", completion, None, {"numbers": list(numbers), "target": target})])[0]


@pytest.mark.parametrize(
    "completion",
    [
        "3*5+7", " 3 * 5 + 7 ", "7+3*5", "(3*5)+7", "((3*5)+7)", "3*5+7=22", "3×5+7", "<answer>3*5+7</answer>",
        "3+5 <answer>3*5+7 = 22</answer>", "7+5*3\n",
    ],
)  # fmt: skip
def test_right(completion):
    assert score(completion) == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "", "22", "3+5+7", "3*5", "3*5+7+0", "3*5+7*1", "3*5+7-3+3", "35-7-6", "3*5+7=23", "3*5+7=22=22", "3*5--7",
        "+3*5+7", "3*5+(+7)", "-3*-5+7", "3**5", "3*5+7)", "(3*5+7", "3*5+7;", "3*5+7 # ok", "3 5 7", "3.0*5+7",
        "3*5+7e0", "3*5+7 because", "<answer>3*5+7", "<answer>22</answer>", "__import__('os')", "3*5+7\x00", "٣*5+7",
        "3(5)+7", "()", "3*5+7.", "3//5", "7!", "3*5+7==22", "<answer></answer>",
    ],
)  # fmt: skip
def test_wrong(completion):
    assert score(completion) == 0.0


@pytest.mark.parametrize(
    "completion",
    [
        "9**9**9**9",
        "(" * 10_000 + "3" + ")" * 10_000,
        "1" * 100_000,
        "3*5+7" + "+0" * 100_000,
        "3*" * 5000,
        "=" * 100_000,
    ],
)
def test_hostile(completion):
    assert score(completion) == 0.0
    assert score(f"<answer>{completion}</answer>") == 0.0
    assert score(f"3*5+7={completion}") == 0.0


def test_every_number_counts_as_often_as_it_is_given():
    assert score("5+5+7", (5, 5, 7), 17) == 1.0
    assert score("5+5+7", (5, 7, 7), 17) == 0.0
    assert score("5+12", (5, 5, 7), 17) == 0.0


def test_partial_score_is_for_the_right_numbers_only():
    assert score("3+5+7", partial=0.1) == 0.1
    assert score("3+5", partial=0.1) == 0.0
    assert score("3+5+7+", partial=0.1) == 0.0
    assert score("3*5+7", partial=0.1) == 1.0


def test_columns_can_be_named_and_hold_text():
    reward = CountdownReward(numbers_column="input", target_column="output")
    sample = Sample("", "30-100+93", None, {"input": "30,100,93", "output": "23"})
    assert reward([sample]) == [1.0]


def test_every_public_problem_has_a_solution_that_scores_and_no_other_value_does():
    reward = CountdownReward(numbers_column="input", target_column="output")
    for row in rows("countdown"):
        seen = {}
        for a, b, c in itertools.permutations(row["input"].split(",")):
            for one, two in itertools.product("+-*/", repeat=2):
                for text in (f"({a}{one}{b}){two}{c}", f"{a}{one}({b}{two}{c})"):
                    seen[text] = reward([Sample("", text, None, row)])[0]
        assert set(seen.values()) == {0.0, 1.0}
        for text, value in seen.items():
            try:
                reached = python_value(text) == int(row["output"])
            except ZeroDivisionError:
                reached = False
            assert value == reached, (row, text)


def python_value(text):
    """An independent reference for expressions made by these tests."""
    import re

    return eval(re.sub(r"(\d+)", r"Fraction(\1)", text), {"Fraction": Fraction})


@given(st.integers(0, 2**32))
def test_values_agree_with_python(seed):
    rng = random.Random(seed)

    def build(depth):
        if depth == 0 or rng.random() < 0.3:
            return str(rng.randint(0, 99))
        left, right = build(depth - 1), build(depth - 1)
        text = f"{left}{rng.choice([' ', ''])}{rng.choice('+-*/')}{right}"
        return f"({text})" if rng.random() < 0.5 else text

    text = build(3)
    try:
        expected = python_value(text)
    except ZeroDivisionError:
        assert evaluate(text) is None
    else:
        value, _ = evaluate(text)
        assert value == expected


@given(st.text(alphabet="0123456789+-*/()= .ex\n", max_size=60))
def test_evaluation_never_raises(text):
    assert evaluate(text) is None or isinstance(evaluate(text)[0], Fraction)
