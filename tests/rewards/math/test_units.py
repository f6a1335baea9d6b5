import pytest

from lit_qrl.rewards.math.equivalence import canonical_unit, same_unit, split_unit


@pytest.mark.parametrize(
    "text, core, unit",
    [
        (r"5\text{ cm}", "5", ("cm",)),
        (r"12\text{ cm}^2", "12", ("cm^2",)),
        (r"12 \text{~cm}^{2}", "12", ("cm^2",)),
        ("5 m", "5", ("m",)),
        ("5cm", "5", ("cm",)),
        ("10 square feet", "10", ("ft^2",)),
        ("60 mph", "60", ("mi", "/", "h")),
        ("60 miles per hour", "60", ("mi", "/", "h")),
        ("18 eggs per day", "18", ("egg", "/", "day")),
        (r"90^{\circ}", "90", ("deg",)),
        (r"36\pi \text{ cm}^3", r"36\pi", ("cm^3",)),
        ("6:00 pm", "6:00", ("pm",)),
        ("2.5 million dollars", "2.5 million", ("$",)),
        (r"\frac{1}{2} hour", r"\frac{1}{2}", ("h",)),
    ],
)
def test_units_are_split_off(text, core, unit):
    assert split_unit(text) == (core, unit)


@pytest.mark.parametrize(
    "text",
    [
        "5x",
        "5 x",
        "5m",
        "5",
        "x + y",
        r"5 \sin x",
        r"\sin 30^{\circ}",
        r"\text{east}",
        "2 or 3",
        "f(x)",
        r"\frac{x}{2}",
    ],
)
def test_mathematics_is_not_a_unit(text):
    assert split_unit(text) == (text, ())


@pytest.mark.parametrize(
    "one, other, same",
    [
        ("cm", "", True),
        ("cm", "centimeters", True),
        ("cm", "m", False),
        ("cm^2", "cm", False),
        ("hours", "hrs", True),
        ("hours", "minutes", False),
        ("km/h", "kilometers per hour", True),
        ("km/h", "m/s", False),
        ("eggs", "duck eggs", True),
        ("apples", "oranges", False),
        ("p.m.", "PM", True),
        ("am", "pm", False),
    ],
)
def test_units_agree(one, other, same):
    assert same_unit(canonical_unit(one), canonical_unit(other)) is same


def test_long_text_is_no_problem():
    for text in ("1" * 1000, "1 " * 500 + "!", "a" * 1000, r"\text{" * 100, "1" + " a." * 300):
        assert split_unit(text)[0]
