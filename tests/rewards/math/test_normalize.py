from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_qrl.rewards.math.equivalence import normalize, read_number, same_number, squeezed


@pytest.mark.parametrize(
    "text, normal",
    [
        (r"$\dfrac12$", r"\frac{1}{2}"),
        (r"\frac 59", r"\frac{5}{9}"),
        (r"\frac1{16}", r"\frac{1}{16}"),
        (r"\frac{270}7", r"\frac{270}{7}"),
        (r"11\sqrt2", r"11\sqrt{2}"),
        ("sqrt(2)/2", r"\sqrt{2}/2"),
        (r"\left( 3, 4 \right)", "( 3, 4 )"),
        (r"10,\!080", "10,080"),
        (r"11,\! 111", "11,111"),
        (r"10\,000", "10,000"),
        ("10{,}000", "10,000"),
        ("90°", r"90 ^{\circ}"),
        (r"90^\circ", r"90^{\circ}"),
        ("50 percent", "50%"),
        (r"50\%", "50%"),
        (r"\$18", "18"),
        ("**5**", "5"),
        (r"\(5\).", "5"),
        ("The final answer is 5.", "5"),
        ("x <= 3", r"x \le 3"),
        (r"\mathrm{cm}", r"\text{cm}"),
        ("x^10", "x^{10}"),
        ("2**-3", "2^{-3}"),
        (r"\varnothing", r"\emptyset"),
    ],
)
def test_normalize(text, normal):
    assert normalize(text).replace(" ", "") == normal.replace(" ", "")


@pytest.mark.parametrize(
    "text, value",
    [
        ("72", 72),
        ("-72.50", Fraction(-145, 2)),
        ("1,234,567.5", Fraction(2469135, 2)),
        ("25 000", 25000),
        ("3/4", Fraction(3, 4)),
        ("-3/4", Fraction(-3, 4)),
        (r"\frac{-3}{4}", Fraction(-3, 4)),
        (r"-\frac{3}{-4}", Fraction(3, 4)),
        (r"3\frac{1}{2}", Fraction(7, 2)),
        (r"-3\frac{1}{2}", Fraction(-7, 2)),
        ("3 1/2", Fraction(7, 2)),
        ("12.5%", Fraction(1, 8)),
        (r"1.5 \times 10^{-3}", Fraction(3, 2000)),
        ("2e3", 2000),
        (r"0.1\overline{6}", Fraction(1, 6)),
        (".5", Fraction(1, 2)),
        ("5.", 5),
        ("(5)", 5),
        ("2.5 million", 2_500_000),
    ],
)
def test_numbers_are_read_exactly(text, value):
    read = read_number(text)
    assert read is not None
    assert read.value == value


@pytest.mark.parametrize(
    "text", ["", "x", "1/0", "1,23", "1 2", "1.2.3", "--5", "1e9999", "5x", "1/2/3", "%", "1,2", "٣x"]
)
def test_what_is_not_one_number_is_not_read(text):
    assert read_number(text) is None


@pytest.mark.parametrize(
    "gold, answer, same",
    [
        ("1/3", "0.333333", True),
        ("1/3", "0.333334", False),
        ("1/3", "0.33333", False),
        ("0.333333", "0.3333333", False),
        ("50%", "0.5", True),
        ("50%", "50", True),
        ("50", "50%", True),
        ("0.5", "0.5%", False),
        ("0.0000672", "0.0000673", False),
        ("5", "5.0", True),
    ],
)
def test_same_number(gold, answer, same):
    assert same_number(read_number(gold), read_number(answer)) is same


@given(st.integers(-(10**12), 10**12))
def test_integers_survive_every_spelling(value):
    for text in (
        str(value),
        f"{value:,}",
        f"{value}.00",
        f"${value}$",
        rf"\frac{{{2 * value}}}{{2}}",
        f"{value * 100}%",
    ):
        read = read_number(normalize(text))
        assert read is not None
        assert read.value == value


@given(st.text(max_size=200))
def test_normalizing_never_raises(text):
    read_number(squeezed(normalize(text)))
