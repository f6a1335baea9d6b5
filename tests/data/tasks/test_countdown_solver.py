import itertools
from fractions import Fraction

import pytest

from lit_qrl.data.tasks.countdown import expressions, reachable, solve
from lit_qrl.rewards.countdown import evaluate


def calculate(op, a, b):
    if op == "/":
        return None if b == 0 else a / b
    return {"+": a + b, "-": a - b, "*": a * b}[op]


def brute_force(numbers):
    """All (value, value with the numbers replaced by 10007, 20011, 30029) of both shapes of three-number trees."""
    stand_ins = [Fraction(n) for n in (10007, 20011, 30029)]
    for order in itertools.permutations(range(3)):
        for first, second in itertools.product("+-*/", repeat=2):
            for left in (True, False):
                pair = []
                for values in (numbers, stand_ins):
                    a, b, c = (Fraction(values[i]) for i in order)
                    inner = calculate(first, a, b)
                    if inner is None:
                        break
                    outer = calculate(second, inner, c) if left else calculate(second, c, inner)
                    if outer is None:
                        break
                    pair.append(outer)
                if len(pair) == 2:
                    yield tuple(pair)


@pytest.mark.parametrize("numbers", [(2, 3, 7), (1, 4, 6), (3, 8, 30), (5, 10, 15)])
def test_solver_finds_every_expression_once_and_nothing_else(numbers):
    # Two trees are the same expression when they agree as functions, told here by large stand-ins for the numbers.
    by_function = {function: value for value, function in brute_force(numbers)}
    found = expressions(numbers)
    assert len(found) == len(by_function)
    assert sorted(e.value for e in found) == sorted(by_function.values())
    assert len({e.text for e in found}) == len(found)


@pytest.mark.parametrize("numbers", [(2, 3, 7), (4, 4, 6), (9, 9, 9), (1, 1, 30)])
def test_reachable_agrees_with_brute_force(numbers):
    values = {value for value, _ in brute_force(numbers)}
    assert reachable(numbers, 50) == tuple(t for t in range(1, 51) if Fraction(t) in values)


def test_solutions_are_what_they_say():
    for numbers, target in [((3, 5, 7), 22), ((25, 6, 4), 27), ((2, 2, 2), 2), ((1, 2, 3, 4), 24)]:
        solutions = solve(numbers, target)
        assert solutions
        for text in solutions:
            result = evaluate(text)
            assert result is not None
            assert result[0] == target
            assert sorted(result[1]) == sorted(numbers)
    assert solve((1, 1, 1), 30) == []


def test_solutions_carry_no_needless_parentheses():
    assert solve((3, 5, 7), 15) == ["7+5+3"]
    assert solve((2, 3, 10), 16) == ["10+3*2"]
    assert solve((2, 3, 10), 26) == ["(10+3)*2"]


def test_expressions_want_sorted_numbers():
    with pytest.raises(ValueError, match="ascending"):
        expressions((3, 2))
