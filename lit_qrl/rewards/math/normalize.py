"""Answers brought to one spelling, and those that are plain numbers read exactly.

None of this needs an algebra system, so most answers are settled here.
"""

import re
from fractions import Fraction
from typing import NamedTuple

from lit_qrl.rewards.math.answers import unescaped

_CHARACTERS = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "‐": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "∕": "/",
        "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ",
        "∈": r"\in ", "∅": r"\emptyset ", "°": r"^\circ ", "±": r"\pm ", "θ": r"\theta ", "α": r"\alpha ",
        "ℝ": r"\mathbb{R}", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}",
        "⅔": r"\frac{2}{3}", "²": "^2", "³": "^3", "⟨": "(", "⟩": ")", "“": '"', "”": '"', "’": "'", "\u00a0": " ",
        "\u2009": " ", "\u202f": " ", "，": ",", "；": ";", "（": "(", "）": ")", "％": "%", "€": "", "£": "", "¥": "",
    }
)  # fmt: skip
_REPLACEMENTS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"√\s*(\d+|[A-Za-z]|\([^()]*\))", r"\\sqrt{\1}"),
        (r"\\!\s*", ""),
        (r"(?<=\d)(?:\\[,;: ]|~)\s*(?=\d{3}(?!\d))", ","),
        (r"\s*\{\s*,\s*\}\s*", ","),
        (r"\\(?:[,;:>]|quad(?![a-zA-Z])|qquad(?![a-zA-Z])|displaystyle(?![a-zA-Z]))|(?<!\\)\\ |~", " "),
        (r"\\[mb]?(?:left|right)(?![a-zA-Z])\s*\.?|\\[bB]igg?[lr]?(?![a-zA-Z])", ""),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\langle(?![a-zA-Z])", "("),
        (r"\\rangle(?![a-zA-Z])", ")"),
        (r"\\[lr]brack(?![a-zA-Z])", lambda m: "[" if "l" in m.group() else "]"),
        (r"\\(?:text(?:normal|bf|it|rm|sf|tt|up)?|[mh]box|math(?:rm|bf|it|sf|tt)|bm|boldsymbol)\s*(?={)", r"\\text"),
        (r"^\s*\\text\{([^{}]*\d[^{}]*|\s*infinity\s*)\}\s*$", r"\1"),
        (r"\\text\{\s*(hundred|thousand|[mb]illion|trillion)\s*\}", r" \1"),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:leq|leqslant|leqq)(?![a-zA-Z])|<=|≦", r"\\le "),
        (r"\\(?:geq|geqslant|geqq)(?![a-zA-Z])|>=|≧", r"\\ge "),
        (r"\\neq(?![a-zA-Z])|!=", r"\\ne "),
        (r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"\\cross(?![a-zA-Z])", r"\\times"),
        (r"\\degrees?(?![a-zA-Z])|\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![a-zA-Z])|\^\s*o(?![a-zA-Z])", r"^{\\circ}"),
        (r"\\dots(?![a-zA-Z])|\\cdots(?![a-zA-Z])", r"\\ldots"),
        (r"\*\*", "^"),
        (r"\\\$|\$", ""),
        (r"\\?%", "%"),
        (r"(?<=\d)\s*(?:\\text\{\s*)?\b[Pp]er\s?cent(?:age)?(?![a-zA-Z])(?:\s*\})?", "%"),
        (r"(?<![\\a-zA-Z])sqrt(?=\s*[({\[\d])", r"\\sqrt"),
        (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi "),
        (r"(?<![\\a-zA-Z])(?:infinity|inf|oo)(?![a-zA-Z])", r"\\infty "),
        (r"\^\s*(-?\d{2,}|-\d+)", r"^{\1}"),
        (r"\^\s*\(([^()]*)\)", r"^{\1}"),
        (r"\\sqrt\s*([^\s{\[\\])", r"\\sqrt{\1}"),
        (r"\\sqrt\s*(\\[a-zA-Z]+)", r"\\sqrt{\1}"),
        (r"\\frac\s*([^\s{\\])\s*([^\s{\\])", r"\\frac{\1}{\2}"),
        (r"\\frac\s*([^\s{\\])\s*(?={)", r"\\frac{\1}"),
        (r"\\frac\s*(\{[^{}]*\})\s*([^\s{\\])", r"\\frac\1{\2}"),
        (r"(?<=\d)i(?![a-zA-Z])", " i"),
        (r"\s+", " "),
    ]
]  # fmt: skip
_PREFIX = re.compile(r"^(?:(?:so|thus|hence),? )?(?:the )?(?:final )?answer(?: is| ?[:=])[: ]*", re.IGNORECASE)
_WRAPPERS = [("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"), ('"', '"')]


def normalize(text: str) -> str:
    r"""Return an answer in one LaTeX spelling: no layout, no dollar signs, whole fractions and roots.

    Args:
        text: the answer as written, at most some hundred characters.

    >>> normalize(r"The answer is $\dfrac12$.")
    '\\frac{1}{2}'
    >>> normalize("10,\\!080 \\text{ cm}²")
    '10,080 \\text{ cm}^2'
    """
    text = _unwrapped(unescaped(text))
    text = _PREFIX.sub("", text)
    text = _unwrapped(text).translate(_CHARACTERS)
    for pattern, replacement in _REPLACEMENTS:
        text = pattern.sub(replacement, text)
    return text.strip().rstrip(".,;:").strip() if not text.rstrip().endswith(r"\ldots") else text.strip()


_DECIMAL_COMMA = re.compile(
    r"(?<![\w.,])(\d{1,3}(?:(?:\.|\\[,;: ]|[ \u00a0\u202f])\d{3})+|\d+)(?:,|\{,\})(\d+)(?![\d.,]*\d)"
)


def with_decimal_points(text: str) -> str:
    r"""Return an answer with decimal points where it has decimal commas; `, ` with a space stays a list's.

    >>> with_decimal_points("1.234,50 und 0{,}5"), with_decimal_points("(1, 2)")
    ('1234.50 und 0.5', '(1, 2)')
    """
    return _DECIMAL_COMMA.sub(lambda found: f"{re.sub(r'[^0-9]', '', found[1])}.{found[2]}", text)


def _unwrapped(text: str) -> str:
    before = None
    while before != text:
        before = text
        text = text.strip()
        if text.endswith((".", ",", ";")):
            text = text[:-1].rstrip()
        for opening, closing in _WRAPPERS:
            inside = text[len(opening) : len(text) - len(closing)]
            wrapped = text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing)
            if wrapped and opening not in inside and closing not in inside:
                text = inside
    return text


def squeezed(text: str) -> str:
    r"""Return a normalized answer without spaces and without the braces of single characters: a key for equality.

    >>> squeezed(r"52_{8}") == squeezed("52_8")
    True
    """
    text = re.sub(r"(\\[a-zA-Z]+) (?=[a-zA-Z])", r"\1\\", text)
    text = re.sub(r"(?<=\d) (?=[\d.])", r"\\", text).replace(" ", "")
    return re.sub(r"([\^_])\{(\w)\}", r"\1\2", text)


class Value(NamedTuple):
    """A number as written.

    Args:
        value: its exact value; a percent sign divides by 100.
        percent: whether it had a percent sign.
        decimals: digits after the decimal point, or None for fractions and integers.
    """

    value: Fraction
    percent: bool = False
    decimals: int | None = None


_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)"
_SIGN = r"\s*([-+]?)\s*"
_PLAIN = re.compile(rf"{_SIGN}({_DECIMAL})")
_SCIENTIFIC = re.compile(
    rf"{_SIGN}({_DECIMAL})\s*(?:(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*\{{?\s*([-+]?\d{{1,3}})\s*\}}?|[eE]([-+]?\d{{1,3}}))"
)
_SLASH = re.compile(rf"{_SIGN}\(?\s*({_DECIMAL})\s*\)?\s*/{_SIGN}\(?\s*({_DECIMAL})\s*\)?")
_FRAC = re.compile(rf"{_SIGN}\\frac\s*\{{{_SIGN}({_DECIMAL})\s*\}}\s*\{{{_SIGN}({_DECIMAL})\s*\}}")
_MIXED = re.compile(r"\s*([-+]?)\s*(\d+)(?:\s*\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|\s+(\d+)\s*/\s*(\d+))")
_SCALED = re.compile(rf"({_SIGN}{_DECIMAL})\s*(hundred|thousand|[mb]illion|trillion)")
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_REPEATING = re.compile(r"\s*([-+]?)\s*(\d*)\.(\d*)\\overline\s*\{\s*(\d+)\s*\}")


def read_number(text: str) -> Value | None:
    r"""Return the exact value of a normalized answer that is a plain number, or None.

    Reads integers, decimals, thousands separated by commas or spaces, a/b, \frac, mixed numbers, a × 10^n, repeating
    decimals, and a percent sign after any of them.

    >>> read_number(r"3\frac{1}{2}")
    Value(value=Fraction(7, 2), percent=False, decimals=None)
    >>> read_number("12.5%")
    Value(value=Fraction(1, 8), percent=True, decimals=1)
    """
    text = text.strip()
    percent = text.endswith("%")
    if percent:
        text = text[:-1].rstrip()
    if len(text) > 2 and text[0] == "(" and text[-1] == ")" and "(" not in text[1:]:
        text = text[1:-1]
    try:
        value, decimals = _read(text)
    except ZeroDivisionError:
        return None
    if value is None:
        return None
    return Value(value / 100 if percent else value, percent, decimals)


def _read(text: str) -> tuple[Fraction | None, int | None]:
    if m := _PLAIN.fullmatch(text):
        return _signed(m[1]) * _decimal(m[2]), _decimals(m[2])
    if m := _SLASH.fullmatch(text):
        return _signed(m[1]) * _signed(m[3]) * _decimal(m[2]) / _decimal(m[4]), None
    if m := _FRAC.fullmatch(text):
        return _signed(m[1]) * _signed(m[2]) * _signed(m[4]) * _decimal(m[3]) / _decimal(m[5]), None
    if m := _MIXED.fullmatch(text):
        part = Fraction(int(m[3] or m[5]), int(m[4] or m[6]))
        return (_signed(m[1]) * (int(m[2]) + part), None) if part < 1 else (None, None)
    if m := _SCIENTIFIC.fullmatch(text):
        return _signed(m[1]) * _decimal(m[2]) * Fraction(10) ** int(m[3] or m[4]), None
    if m := _SCALED.fullmatch(text):
        value, _ = _read(m[1])
        return (None if value is None else value * 10 ** _SCALES[m[3]]), None
    if m := _REPEATING.fullmatch(text):
        whole, fixed, cycle = m[2] or "0", m[3], m[4]
        tail = Fraction(int(cycle), (10 ** len(cycle) - 1) * 10 ** len(fixed))
        return _signed(m[1]) * (_decimal(f"{whole}.{fixed}") + tail), None
    return None, None


def _signed(sign: str) -> int:
    return -1 if sign == "-" else 1


def _decimal(digits: str) -> Fraction:
    whole, _, part = digits.replace(",", "").replace(" ", "").partition(".")
    return Fraction(int((whole + part) or "0"), 10 ** len(part))


def _decimals(digits: str) -> int | None:
    return len(digits.partition(".")[2]) if "." in digits else None


ROUNDED_DECIMALS = 6
"""A decimal with at least so many places equals the fraction that it rounds: 0.333333 = 1/3, but 0.33 does not."""


def same_number(gold: Value, answer: Value) -> bool:
    """Return whether two numbers are the same answer.

    Exact, except for a long decimal that rounds a fraction, and for a percent sign that one side leaves out: 50 % is
    0.5, and also 50 where a question asks "what percent".

    >>> same_number(Value(Fraction(1, 2)), Value(Fraction(1, 2), percent=True))
    True
    """
    if gold.value == answer.value:
        return True
    if gold.percent != answer.percent:
        numerals = (gold.value * (100 if gold.percent else 1), answer.value * (100 if answer.percent else 1))
        return numerals[0] == numerals[1] and (gold.percent or abs(gold.value) >= 1)
    rounded, exact = (gold, answer) if gold.decimals is not None else (answer, gold)
    places = rounded.decimals
    if places is None or exact.decimals is not None or places < ROUNDED_DECIMALS:
        return False
    return abs(rounded.value - exact.value) * 2 * 10**places <= 1
