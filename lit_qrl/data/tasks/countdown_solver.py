"""Every solution of a Countdown problem, each written once, in one canonical form."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import combinations, product
from typing import Literal

# 3 numbers have about a hundred expressions, 4 a few thousand, 5 some hundred thousand (half a minute).
MAX_NUMBERS = 5


@dataclass(frozen=True)
class Expression:
    """A sum or a product of any number of operands, or a single number.

    Args:
        kind: `+` for a sum, `*` for a product, `n` for a number.
        direct: operands that are added or multiplied.
        inverse: operands that are subtracted or divided by.
        number: the number, when `kind` is `n`.
    """

    kind: Literal["n", "+", "*"]
    direct: tuple["Expression", ...] = ()
    inverse: tuple["Expression", ...] = ()
    number: int = 0

    @cached_property
    def value(self) -> Fraction:
        """The exact value."""
        if self.kind == "n":
            return Fraction(self.number)
        if self.kind == "+":
            return sum((e.value for e in self.direct), Fraction(0)) - sum((e.value for e in self.inverse), Fraction(0))
        result = Fraction(1)
        for operand in self.direct:
            result *= operand.value
        for operand in self.inverse:
            result /= operand.value
        return result

    @cached_property
    def text(self) -> str:
        """The expression with no spaces and no parentheses that could be left out."""
        if self.kind == "n":
            return str(self.number)
        forward, backward = ("+", "-") if self.kind == "+" else ("*", "/")

        def written(operand: "Expression") -> str:
            return f"({operand.text})" if self.kind == "*" and operand.kind == "+" else operand.text

        return forward.join(map(written, self.direct)) + "".join(backward + written(e) for e in self.inverse)

    def as_operands(self, kind: str) -> tuple[tuple["Expression", ...], tuple["Expression", ...]]:
        """Return (direct, inverse) operands when this becomes a part of a sum or product."""
        return (self.direct, self.inverse) if self.kind == kind else ((self,), ())


def _in_order(operands: Sequence[Expression]) -> tuple[Expression, ...]:
    return tuple(sorted(operands, key=lambda e: (-e.value, e.text)))


def _join(kind: Literal["+", "*"], left: Expression, right: Expression, *, inverse: bool) -> Expression:
    """Return left∘right, flattened: a − (b − c) becomes a + c − b, and operands stand largest first."""
    direct, inverted = left.as_operands(kind)
    more, less = right.as_operands(kind)
    if inverse:
        more, less = less, more
    return Expression(kind, _in_order(direct + more), _in_order(inverted + less))


def _pairs(left: Expression, right: Expression) -> Iterator[Expression]:
    yield _join("+", left, right, inverse=False)
    yield _join("+", left, right, inverse=True)
    yield _join("+", right, left, inverse=True)
    yield _join("*", left, right, inverse=False)
    if right.value != 0:
        yield _join("*", left, right, inverse=True)
    if left.value != 0:
        yield _join("*", right, left, inverse=True)


def _splits(numbers: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield every way to part the numbers in two, each once: the first number is always on the left."""
    positions = range(1, len(numbers))
    for size in range(len(positions)):
        for chosen in combinations(positions, size):
            yield tuple(numbers[i] for i in (0, *chosen)), tuple(numbers[i] for i in positions if i not in chosen)


@lru_cache(maxsize=4096)
def expressions(numbers: tuple[int, ...]) -> tuple[Expression, ...]:
    """Return every expression that uses each of the sorted `numbers` exactly once, without duplicates.

    Two expressions count as one when they differ only by the order of operands or by parentheses that do not matter.

    Args:
        numbers: positive integers, ascending; at most `MAX_NUMBERS` of them.

    Raises:
        ValueError: numbers that are not sorted, or too many of them.

    >>> [e.text for e in expressions((2, 3))]
    ['3+2', '2-3', '3-2', '3*2', '2/3', '3/2']
    """
    if list(numbers) != sorted(numbers) or not 1 <= len(numbers) <= MAX_NUMBERS:
        raise ValueError(f"Expected 1 to {MAX_NUMBERS} numbers in ascending order, given {numbers}. Sort them first.")
    if len(numbers) == 1:
        return (Expression("n", number=numbers[0]),)
    found: dict[str, Expression] = {}
    for some, rest in _splits(numbers):
        for left, right in product(expressions(some), expressions(rest)):
            for joined in _pairs(left, right):
                found.setdefault(joined.text, joined)
    return tuple(found.values())


def solve(numbers: Sequence[int], target: int) -> list[str]:
    """Return all expressions that use each number exactly once and equal `target`, sorted; empty when there is none.

    Args:
        numbers: positive integers, in any order.
        target: the value to reach.

    >>> solve([3, 5, 7], 22)
    ['5*3+7']
    """
    return sorted(e.text for e in expressions(tuple(sorted(numbers))) if e.value == target)


@lru_cache(maxsize=1 << 16)
def _values(numbers: tuple[int, ...]) -> frozenset[tuple[int, int]]:
    """All reachable values as (numerator, denominator), not reduced: ten times faster than fractions."""
    if len(numbers) == 1:
        return frozenset({(numbers[0], 1)})
    found: set[tuple[int, int]] = set()
    for some, rest in _splits(numbers):
        for (p, q), (r, s) in product(_values(some), _values(rest)):
            found |= {(p * s + r * q, q * s), (p * s - r * q, q * s), (r * q - p * s, q * s), (p * r, q * s)}
            if r:
                found.add((p * s, q * r))
            if p:
                found.add((r * q, s * p))
    return frozenset(found)


@lru_cache(maxsize=1 << 16)
def reachable(numbers: tuple[int, ...], max_target: int) -> tuple[int, ...]:
    """Return the integers in 1..max_target that the sorted `numbers` can make, ascending.

    Args:
        numbers: positive integers, ascending.
        max_target: the largest target of interest.

    >>> reachable((2, 3), 10)
    (1, 5, 6)
    """
    whole = {p // q for p, q in _values(numbers) if p % q == 0}
    return tuple(sorted(value for value in whole if 1 <= value <= max_target))
