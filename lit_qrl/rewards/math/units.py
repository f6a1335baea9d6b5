"""Units after an answer: taken off, and compared when both sides name one."""

import re

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
_SQUARES = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}
_FILLERS = {"of", "the", "a", "an", "in", "each", "total", "unit", "units"}
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
    words: list[str] = []
    power = ""
    for match in _WORD.finditer(unit):
        if match.group() == "/":
            words.append("/")
            continue
        word, exponent = match.group(1), match.group(2) or ""
        if word.lower() in _SQUARES:
            power = _SQUARES[word.lower()]
            continue
        if word.lower() in _COMPOUND:
            words.extend(_COMPOUND[word.lower()].split())
            continue
        if word.lower() in _FILLERS and (words or word.lower() != "in"):
            continue
        exponent, power = exponent or power, ""
        words.append(_singular(word) + (f"^{exponent}" if exponent else ""))
    return tuple(words)


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
        return measured[0] == measured[1] or (_only_nouns(gold, answer) and set(measured[0]) <= set(measured[1]))
    return set(gold) <= set(answer) or set(answer) <= set(gold)


def _only_nouns(short: tuple[str, ...], long: tuple[str, ...]) -> bool:
    """Return whether `short` is only nouns that `long` also has ("eggs" of "eggs per day")."""
    return not _is_known(short) and set(short) <= set(long)
