import itertools
from fractions import Fraction

import pytest

from lit_qrl.data.tasks.countdown import reachable


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


@pytest.mark.parametrize("numbers", [(2, 3, 7), (4, 4, 6), (9, 9, 9), (1, 1, 30)])
def test_reachable_agrees_with_brute_force(numbers):
    values = {value for value, _ in brute_force(numbers)}
    assert reachable(numbers, 50) == tuple(t for t in range(1, 51) if Fraction(t) in values)
