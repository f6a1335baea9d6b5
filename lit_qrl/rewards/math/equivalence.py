"""Whether two answers are the same: spelling, numbers, units and structure here, algebra by math-verify.

`settled` needs no algebra and is cheap; `equivalent` may run for ever on hostile input and belongs in a process that
can be killed (`lit_qrl.rewards.workers`).
"""

import re
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

_COMMAND = re.compile(r"(?<!\\)(\\+)([A-Za-z]+)")
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
        (r"\s*\{\s*,\s*\}\s*", ","),
        (r"\\(?:[,;:>]|quad(?![a-zA-Z])|qquad(?![a-zA-Z])|displaystyle(?![a-zA-Z]))|(?<!\\)\\ |~", " "),
        (r"\\[mb]?(?:left|right)(?![a-zA-Z])\s*\.?|\\[bB]igg?[lr]?(?![a-zA-Z])", ""),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\langle(?![a-zA-Z])", "("),
        (r"\\rangle(?![a-zA-Z])", ")"),
        (r"\\(?:text(?:normal|bf|it|rm|sf|tt|up)?|[mh]box|math(?:rm|bf|it|sf|tt)|bm|boldsymbol)\s*(?={)", r"\\text"),
        (r"^\s*\\text\{([^{}]*\d[^{}]*|\s*infinity\s*)\}\s*$", r"\1"),
        (r"\\text\{\s*(hundred|thousand|[mb]illion|trillion)\s*\}", r" \1"),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"\\degrees?(?![a-zA-Z])|\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![a-zA-Z])|\^\s*o(?![a-zA-Z])", r"^{\\circ}"),
        (r"\\dots(?![a-zA-Z])|\\cdots(?![a-zA-Z])", r"\\ldots"),
        (r"\*\*", "^"),
        (r"\\\$|\$", ""),
        (r"\\?%", "%"),
        (r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi "),
        (r"\^\s*(-?\d{2,}|-\d+)", r"^{\1}"),
        (r"\\frac\s*([^\s{\\])\s*([^\s{\\])", r"\\frac{\1}{\2}"),
    ]
]  # fmt: skip
_PREFIX = re.compile(r"^(?:(?:so|thus|hence),? )?(?:the )?(?:final )?answer(?: is| ?[:=])[: ]*", re.IGNORECASE)
_WRAPPERS = [("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"), ('"', '"')]


def unescaped(text: str) -> str:
    r"""Return LaTeX without the second backslashes that JSON puts; a matrix keeps the `\\` that ends its rows.

    >>> unescaped(r"\\frac{1}{2}"), unescaped(r"\begin{pmatrix} 1 \\ x \end{pmatrix}")
    ('\\frac{1}{2}', '\\begin{pmatrix} 1 \\\\ x \\end{pmatrix}')
    """
    runs = [len(run) for run, _ in _COMMAND.findall(text)]
    while runs and all(run % 2 == 0 for run in runs):
        text, runs = text.replace("\\\\", "\\"), [run // 2 for run in runs]
    return text


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
_SLASH = re.compile(rf"{_SIGN}\(?{_SIGN}({_DECIMAL})\s*\)?\s*/\s*\(?{_SIGN}({_DECIMAL})\s*\)?")
_MIXED = re.compile(rf"{_SIGN}(\d+)\s+\(?(\d+)\s*\)?\s*/\s*\(?(\d+)\s*\)?")
_FRAC = re.compile(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
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
        value, decimals = _read(_FRAC.sub(r" (\1)/(\2)", text))
    except ZeroDivisionError:
        return None
    if value is None:
        return None
    return Value(value / 100 if percent else value, percent, decimals)


def _read(text: str) -> tuple[Fraction | None, int | None]:
    if m := _PLAIN.fullmatch(text):
        return _signed(m[1]) * _decimal(m[2]), len(m[2].partition(".")[2]) if "." in m[2] else None
    if m := _SLASH.fullmatch(text):
        return _signed(m[1]) * _signed(m[2]) * _signed(m[4]) * _decimal(m[3]) / _decimal(m[5]), None
    if m := _MIXED.fullmatch(text):
        part = Fraction(int(m[3]), int(m[4]))
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


_ALIASES = {
    "m": "m meter metre", "cm": "cm centimeter centimetre", "mm": "mm millimeter millimetre",
    "km": "km kilometer kilometre", "in": "in inch inche", "ft": "ft foot feet", "yd": "yd yard", "mi": "mi mile",
    "g": "g gram gm", "kg": "kg kilogram", "mg": "mg milligram", "lb": "lb lbs pound", "oz": "oz ounce", "ton": "ton",
    "L": "l liter litre", "ml": "ml milliliter millilitre", "gal": "gal gallon", "s": "s sec second",
    "min": "min minute", "h": "h hr hour", "day": "day", "week": "week wk", "month": "month mo", "year": "year yr",
    "deg": "degree deg", "rad": "radian rad", "$": "dollar usd buck", "c": "cent", "am": "am", "pm": "pm",
    "N": "newton", "J": "joule", "W": "watt", "Hz": "hz hertz", "V": "volt", "K": "kelvin", "mol": "mol mole",
    "acre": "acre", "hectare": "hectare ha",
}  # fmt: skip
_CANONICAL = {word: unit for unit, words in _ALIASES.items() for word in words.split()}
_COMPOUND = {"mph": "mi / h", "kmh": "km / h", "kph": "km / h", "fps": "ft / s", "cc": "cm^3", "sqft": "ft^2"}
_WORD = re.compile(r"([A-Za-z]+|\$)(?:\^\{?(\d)\}?)?|/")

# What a bare word may follow: a number, a fraction, a time, π, a root. After anything else a word is mathematics.
_NUMERIC = re.compile(r"(?=.*(?:\d|\\pi))(?:[-+\d.,:/ {}]|\\frac|\\sqrt|\\pi)+")
_BARE_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z]")
_BARE_UNIT = re.compile(r"[A-Za-z](?:[A-Za-z./ '-]|\^\{?\d\}?)*")
_TEXT = re.compile(r"(.*\S)\s*\\text\{([^{}]*)\}\s*(?:\^\s*\{?(\d)\}?)?\s*")
_DEGREES = re.compile(r"(.*\S)\s*\^\{\\circ\}\s*(?:\\text\{\s*)?([CF]?)\s*\}?")
_ANGLE_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_SCALE = re.compile(r"(hundred|thousand|[mb]illion|trillion)(?![A-Za-z])\s*")
_OPERATOR_WORDS = {"or", "and", "if", "mod", "x", "e", "i", "k", "n", "y", "z", "a", "b", "t", "r", "p", "q", "d"}


def split_unit(text: str) -> tuple[str, tuple[str, ...]]:
    r"""Return an answer without its unit, and the unit's words in one spelling (empty without one).

    >>> split_unit(r"12 \text{ square centimeters}")
    ('12', ('cm^2',))
    >>> split_unit("18 eggs per day"), split_unit("5 x")
    (('18', ('egg', '/', 'day')), ('5 x', ()))
    """
    text = text.strip()
    if (m := _DEGREES.fullmatch(text)) and not _ANGLE_FUNCTION.search(m[1]):
        return m[1], ("deg", m[2]) if m[2] else ("deg",)
    if m := _TEXT.fullmatch(text):
        core, _, power = m.groups()
        words = canonical_unit(m[2] + (f"^{power}" if power else ""))
        if words and not core.endswith(("_", "^", "\\", "=", ",", "+", "-")):
            inner, more = split_unit(core) if core.endswith("}") else (core, ())
            return inner, more + words
    m = _BARE_LETTER.search(text)
    core, unit = (text[: m.start()], text[m.start() :]) if m else (text, "")
    scale = _SCALE.match(unit)
    if scale and _NUMERIC.fullmatch(core):  # "2.5 million dollars": the first word is part of the number
        return f"{core.strip()} {scale[1]}", canonical_unit(unit[scale.end() :])
    if unit and _BARE_UNIT.fullmatch(unit) and _NUMERIC.fullmatch(core) and core.count("{") == core.count("}"):
        known = canonical_unit(unit)
        first = re.split(r"[^A-Za-z]", unit.replace(".", ""), maxsplit=1)[0]
        apart = core.endswith(" ")
        plausible = (_is_known(known) and (apart or len(first) > 1)) or (apart and len(first) > 2)
        if known and plausible and first.lower() not in _OPERATOR_WORDS:
            return core.strip(), known
    return text, ()


def canonical_unit(unit: str) -> tuple[str, ...]:
    """Return a unit's words in one spelling: singular, abbreviated, `^2` for square, `/` for per.

    >>> canonical_unit("miles per hour") == canonical_unit("mph")
    True
    """
    unit = re.sub(r"(?<=[A-Za-z])\.", "", unit).replace("~", " ")
    unit = re.sub(r"\bper\b|\ba(?=\s+(?:day|week|month|year|hour)\b)", "/", unit)
    unit = re.sub(r"\b(?:of|the|an?|each|total|units?)\b|(?<=\w )in\b", "", unit, flags=re.IGNORECASE)
    unit = re.sub(r"\b(?:square|sq)\s+([A-Za-z]+)", r"\1^2", unit, flags=re.IGNORECASE)
    unit = re.sub(r"\b(?:cubic|cu)\s+([A-Za-z]+)", r"\1^3", unit, flags=re.IGNORECASE)
    unit = re.sub(r"[A-Za-z]+", lambda found: _COMPOUND.get(found[0].lower(), found[0]), unit)
    spelled = ((match, match[1] and _singular(match[1])) for match in _WORD.finditer(unit))
    return tuple("/" if word is None else word + (f"^{match[2]}" if match[2] else "") for match, word in spelled)


def _singular(word: str) -> str:
    low = word.lower()
    for form in (low, low.removesuffix("s"), low.removesuffix("es")):
        if form in _CANONICAL:
            return _CANONICAL[form]
    return low.removesuffix("s") if len(low) > 3 else low


def _is_known(words: tuple[str, ...]) -> bool:
    return any(word.partition("^")[0] in _ALIASES for word in words)


def same_unit(gold: tuple[str, ...], answer: tuple[str, ...]) -> bool:
    """Return whether two units do not contradict each other; a missing one contradicts nothing.

    Units of measurement must agree; of other nouns ("eggs", "duck eggs") one may say more than the other.

    >>> same_unit(("cm",), ()), same_unit(("cm",), ("m",)), same_unit(("egg",), ("duck", "egg"))
    (True, False, True)
    """
    if not gold or not answer or gold == answer:
        return True
    if _is_known(gold) or _is_known(answer):
        measured = [[w for w in words if w.partition("^")[0] in _ALIASES or w == "/"] for words in (gold, answer)]
        only_nouns = not _is_known(gold) and set(gold) <= set(answer)  # "eggs" of "eggs per day"
        return measured[0] == measured[1] or (only_nouns and set(measured[0]) <= set(measured[1]))
    return set(gold) <= set(answer) or set(answer) <= set(gold)


_AND = re.compile(r",?\s*(?:\\text\{\s*(?:and|or)\s*\}|(?<![\\A-Za-z])(?:and|or)(?![A-Za-z]))\s*|\\\}\s*\\cup\s*\\\{")
_NAME = re.compile(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?'*(?:\s*\([^()=]*\))?|\(\s*[A-Za-z](?:\s*,\s*[A-Za-z])*\s*\)")
_EQUALS = re.compile(r"(?<![<>!\\=:])=(?!=)")
_SET_BUILDER = re.compile(
    r"^[A-Za-z]\s*\\in\s*(?=[\[(\\{])|"
    r"\\\{\s*[A-Za-z]\s*(?:\\in\s*\\mathbb\s*\{?R\}?\s*)?(?:\\mid(?![a-zA-Z])|\\vert(?![a-zA-Z])|:|\|)(.*)\\\}"
)
_BASED = re.compile(r"-?[0-9A-Z]+(?:\.[0-9A-Z]+)?_\{?(?:\d+|\\text\{\s*[a-z]+\s*\})\}?")
_WORDS = re.compile(r"\\text\{([^{}]*)\}")
_TWO_NUMBERS = re.compile(r"(?<![_^\d])\d+ \d")
_LONG_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}|(?<![\\A-Za-z])[A-Za-z]{2,} [A-Za-z]{2,}")
_OPEN, _CLOSE = "([{", ")]}"
MAX_STRUCTURE = 4
"""Levels of tuples within sets within lists that are taken apart."""

Equal = Callable[[str, str], bool]


def settled(gold: str, answer: str) -> bool | None:
    r"""Return whether two answers are the same where that is clear without algebra, else None.

    >>> settled("72", "72.0"), settled("1,000", "10000"), settled("(x+1)^2", "x^2+2x+1")
    (True, False, None)
    """
    gold, answer = normalize(gold), normalize(answer)
    if not gold or not answer:
        return False
    if squeezed(gold) == squeezed(answer):
        return True
    return _numbers(gold, answer)


def equivalent(gold: str, answer: str) -> bool:
    r"""Return whether an answer is the gold answer in another form.

    Equal are numbers of one value, expressions that simplify to each other, tuples element by element, sets and plain
    lists in any order, intervals with the same ends and brackets, relations with the same solutions. A member that
    stands twice counts once, but for a gold list in which one does. A unit may be missing, but not differ. Text is
    compared without case.

    Args:
        gold: the reference.
        answer: what is judged; not symmetric: `x=5` may stand for `5` and a list for a tuple.

    >>> equivalent(r"\{1, 2\}", "2, 1"), equivalent("[0,1)", "(0,1)")
    (True, False)
    """
    return _same(normalize(gold), normalize(answer), 0)


def _same(gold: str, answer: str, level: int) -> bool:
    gold, answer = gold.strip(), answer.strip()
    if not gold or not answer or level > MAX_STRUCTURE:
        return False
    if squeezed(gold) == squeezed(answer):
        return True
    known = _numbers(gold, answer)
    if known is not None:
        return known
    gold, answer = (_AND.sub(", ", _SET_BUILDER.sub(r"\1", text).strip()) for text in (gold, answer))
    (name, *ours), (other, *theirs) = _EQUALS.split(gold), _EQUALS.split(answer)
    if theirs and not ours and len(split_top(answer.rpartition("=")[0])) == 1:  # what a chain ends with
        answer = theirs[-1]
    elif len(ours) == 1 and _NAME.fullmatch(name.strip()) and (not theirs or squeezed(name) == squeezed(other)):
        gold, answer = ours[0], (theirs or [answer])[-1]

    def same(one: str, other: str) -> bool:
        return _same(one, other, level + 1)

    (gold_kind, ours), (answer_kind, theirs) = _container(gold), _container(answer)
    if gold_kind == "group":
        return same(ours[0], answer)
    if answer_kind == "group":
        return same(gold, theirs[0])
    if gold_kind in ("list", "set") or answer_kind in ("list", "set"):
        return _same_collections((gold_kind, ours), (answer_kind, theirs), same)
    return _same_leaf(gold, answer)  # tuples, intervals and unions of them are math-verify's


def _numbers(gold: str, answer: str) -> bool | None:
    (gold, gold_unit), (answer, answer_unit) = split_unit(gold), split_unit(answer)
    one, other = read_number(gold), read_number(answer)
    if one is None or other is None:
        return None
    return same_number(one, other) and same_unit(gold_unit, answer_unit)


def split_top(text: str, separator: str = ",") -> list[str]:
    r"""Return the parts of a text between separators that stand outside of all brackets.

    >>> split_top(r"1, (2, 3), \{4, 5\}")
    ['1', '(2, 3)', '\\{4, 5\\}']
    """
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += character in _OPEN or text.startswith("\\begin", i)
        depth -= character in _CLOSE or text.startswith("\\end", i)
        if character == separator and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    return [*parts, text[start:].strip()]


def _container(text: str) -> tuple[str | None, list[str]]:
    r"""Return what kind of collection a text is, and its members.

    Kinds: `list` (commas or semicolons without brackets, or a ±), `set` (braces), `group` (brackets around one member),
    one of `()`, `(]`, `[)`, `[]`, or None for a single thing. Braces without backslashes are not printed: `{1,3}` is
    a list.
    """
    text = text.strip()
    if read_number(text) is not None:  # its commas are thousands
        return None, []
    members = _members(text)
    if (words := _WORDS.fullmatch(text)) and "," in words[1]:
        members = [rf"\text{{{member.strip()}}}" for member in words[1].split(",")]
    if len(members) > 1:
        return ("list", members) if all(members) else (None, [])
    if text.count(r"\pm") == 1 and "\\mp" not in text:
        return "list", [text.replace(r"\pm", "+"), text.replace(r"\pm", "-")]
    inside, kind = text, ""
    if text.startswith(r"\{") and text.endswith(r"\}"):
        inside, kind = text[2:-2], "set"
    elif text[:1] == "{" and text[-1:] == "}":
        inside, kind = text[1:-1], "list"
    elif text[:1] in ("(", "[") and text[-1:] in (")", "]"):
        inside, kind = text[1:-1], text[0] + text[-1]
    if not kind or not _closed(inside):
        return None, []
    members = _members(inside)
    if len(members) == 1 and kind not in ("(]", "[)"):
        return "group", members
    return (kind, members) if all(members) else (None, [])


def _members(text: str) -> list[str]:
    """Return the members of a collection: those between semicolons, else those between commas."""
    members = split_top(text, ";")
    return members if len(members) > 1 else split_top(text)


def _closed(inside: str) -> bool:
    """Return whether no bracket of `inside` closes one that was opened before it."""
    depths = [*accumulate((character in _OPEN) - (character in _CLOSE) for character in inside)]
    return not depths or min(depths) >= 0 == depths[-1]


def _same_collections(gold: tuple[str | None, list[str]], answer: tuple[str | None, list[str]], same: Equal) -> bool:
    (gold_kind, ours), (answer_kind, theirs) = gold, answer
    if gold_kind == "()" and answer_kind == "list":
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if not {gold_kind, answer_kind} <= {"list", "set"}:
        return False
    if len(ours) != len(theirs):
        # A list in which one stands twice, such as of roots, has each as often as it says.
        once = _distinct(ours, same)
        ours = once if gold_kind == "set" else ours
        theirs = _distinct(theirs, same) if answer_kind == "set" or len(once) == len(ours) else theirs
    return len(ours) == len(theirs) and _any_order(ours, theirs, same)


def _distinct(members: list[str], same: Equal) -> list[str]:
    """Return the members without those that equal an earlier one."""
    kept: list[str] = []
    for member in {squeezed(member): member for member in reversed(members)}.values():
        if not any(same(other, member) for other in kept):
            kept.append(member)
    return kept


def _any_order(ours: list[str], theirs: list[str], same: Equal) -> bool:
    left = list(theirs)
    for member in ours:
        match = next((other for other in left if same(member, other)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _same_leaf(gold: str, answer: str) -> bool:
    if _BASED.fullmatch(gold) or _BASED.fullmatch(answer):  # equal ones are spelled alike
        return False
    marked = "\\text" in gold + answer
    one, other = _as_text(gold, marked), _as_text(answer, marked)
    if one is not None and other is not None:
        return one == other
    if marked and (one is None) != (other is None) and not (one or other or "").isdigit():
        return False
    (gold, gold_unit), (answer, answer_unit) = split_unit(gold), split_unit(answer)
    if not same_unit(gold_unit, answer_unit):
        return False
    if (gold_unit == ("deg",)) != (answer_unit == ("deg",)) and "\\pi" in gold + answer:
        gold, answer = (
            rf"({text}) \cdot \frac{{\pi}}{{180}}" if unit else text
            for text, unit in ((gold, gold_unit), (answer, answer_unit))
        )
    elif gold_unit or answer_unit:
        known = _numbers(gold, answer)
        if known is not None or squeezed(gold) == squeezed(answer):
            return known is not False
    return _algebra(gold, answer)


def _as_text(answer: str, marked: bool) -> str | None:
    r"""Return an answer that is words (or a choice's letter) in lower case, or None for mathematics.

    Any letters are words where one of the two answers is `marked` as text.
    """
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", answer).strip()
    if re.search(r"[\\^_=+*/<>{}|]", text) or not re.search(r"[A-Za-z]", text):
        return None
    words = " ".join(re.sub(r"[^A-Za-z0-9' -]", "", text).casefold().split())
    is_choice = re.fullmatch(r"\(?[A-Ja-j]\)?", text) is not None
    return words if marked or is_choice or (_LONG_WORD.search(text) and not re.search(r"\d", text)) else None


def _algebra(gold: str, answer: str) -> bool:
    if _TWO_NUMBERS.search(gold) or _TWO_NUMBERS.search(answer):  # would be read as a sum
        return False
    from math_verify import verify

    try:
        ours, theirs = _parsed(gold), _parsed(answer)
        if ours is None or theirs is None:
            return False
        return verify([ours], [theirs], allow_set_relation_comp=True, timeout_seconds=None)
    except Exception:  # SymPy raises errors of many kinds on what it cannot represent
        return False


def _parsed(text: str) -> Any:
    """Return math-verify's reading of a whole answer, or None; without its own timeouts, which are signals."""
    from math_verify import parse
    from sympy import I

    text = text.replace("%", r"\%").replace("$", "")
    read = parse(f"${text}$", [_reader()], "no_fallback", "first_match", parsing_timeout=None)  # pyright: ignore
    if len(read) != 1:
        return None
    imaginary = [symbol for symbol in getattr(read[0], "free_symbols", ()) if symbol.name == "i"]
    return read[0].subs(dict.fromkeys(imaginary, I)) if imaginary else read[0]


@cache
def _reader() -> Any:
    """Return the configuration of math-verify's LaTeX reader, which is kept from evaluating source text.

    Its reader of plain expressions calls `eval` and is not used. The LaTeX reader hands the digits of numbers to a
    function of SymPy that calls `eval` too; it is given another one.
    """
    from latex2sympy2_extended import NormalizationConfig, latex2sympy2
    from math_verify import LatexExtractionConfig
    from sympy import Float, Integer

    def parse_number(_: Any, text: str) -> Any:
        digits = text.replace(",", "").replace(" ", "")
        return Integer(int(digits)) if digits.isdecimal() else Float(digits)

    setattr(latex2sympy2._Latex2Sympy, "parse_number", parse_number)  # noqa: B010
    return LatexExtractionConfig(
        boxed_match_priority=-1,
        normalization_config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
        ),
    )


def prepare_worker() -> None:
    """Import and warm up the algebra; raise `RuntimeError` when it does not work as it should."""
    import logging

    logging.disable(logging.CRITICAL)
    right = equivalent("x^2 + 2.0x + 1", "(x+1)^2") and equivalent(r"(-\infty, 1]", r"x \le 1")
    if not right or equivalent("x^2 + 1", "(x+1)^2"):
        raise RuntimeError("math-verify does not judge as expected; install the version that lit-qrl asks for.")
