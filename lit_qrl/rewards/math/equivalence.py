"""Whether two answers are the same: structure and units here, algebra by math-verify.

`settled` needs no algebra and is cheap; `equivalent` may run for ever on hostile input and belongs in a process that
can be killed (`lit_qrl.rewards.workers`).
"""

import re
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any

from lit_qrl.rewards.math.normalize import normalize, read_number, same_number, squeezed
from lit_qrl.rewards.math.units import same_unit, split_unit

_AND = re.compile(r",?\s*(?:\\text\{\s*(?:and|or)\s*\}|(?<![\\A-Za-z])(?:and|or)(?![A-Za-z]))\s*")
_MEMBER = re.compile(r"[A-Za-z]\s*\\in\s*(?=[\[(\\{])")
_NAME = re.compile(
    r"\\?[A-Za-z]+(?:_\{?\w+\}?)?'*(?:\s*\([^()=]*\))?|\(\s*[A-Za-z](?:_\{?\w\}?)?(?:\s*,\s*[A-Za-z](?:_\{?\w\}?)?)*\s*\)"
)
_SET_BUILDER = re.compile(
    r"\\\{\s*[A-Za-z]\s*(?:\\in\s*\\mathbb\s*\{?R\}?\s*)?(?:\\mid(?![a-zA-Z])|\\vert(?![a-zA-Z])|:|\|)(.*)\\\}"
)
_EQUALS = re.compile(r"(?<![<>!\\=:])=(?!=)")
_INEQUALITY = re.compile(r"<|>|\\(?:le|ge|lt|gt|ne)(?![a-zA-Z])")
_SET_NOTATION = re.compile(rf"{_INEQUALITY.pattern}|\\(?:mathbb|cup|cap|setminus|begin|backslash)(?![a-zA-Z])")
_BASED = re.compile(r"(-?[0-9A-Z]+(?:\.[0-9A-Z]+)?)_\{?(\d+|\\text\{\s*[a-z]+\s*\})\}?")
_RATIO = re.compile(r"(\d+(?:\.\d+)?)\s*:\s*(\d+(?:\.\d+)?)")
_WORDS = re.compile(r"\\text\{([^{}]*)\}")
_TWO_NUMBERS = re.compile(r"(?<![_^\d])\d+ \d")
_LONG_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}|(?<![\\A-Za-z])[A-Za-z]{2,} [A-Za-z]{2,}")
_BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9"}
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
    (gold, gold_unit), (answer, answer_unit) = split_unit(gold), split_unit(answer)
    one, other = read_number(gold), read_number(answer)
    if one is not None and other is not None:
        return same_number(one, other) and same_unit(gold_unit, answer_unit)
    return None


def equivalent(gold: str, answer: str) -> bool:
    r"""Return whether an answer is the gold answer in another form.

    Equal are numbers of one value, expressions that simplify to each other, tuples element by element, sets and plain
    lists in any order, intervals with the same ends and brackets, relations with the same solutions. A member that
    stands twice counts twice in a list and once in a set. A unit may be missing, but not differ. Text is compared
    without case.

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
    gold, answer = (_SET_BUILDER.sub(r"\1", _MEMBER.sub("", text, count=1)).strip() for text in (gold, answer))
    gold, answer = _AND.sub(", ", gold), _AND.sub(", ", answer)
    gold, answer = _without_names(gold, answer)

    def same(one: str, other: str) -> bool:
        return _same(one, other, level + 1)

    if "\\cup" in gold and "\\cup" in answer:
        parts = split_top(gold, "\\cup"), split_top(answer, "\\cup")
        if len(parts[0]) == len(parts[1]) and _any_order(*parts, same):
            return True
    else:
        (gold_kind, ours), (answer_kind, theirs) = _container(gold), _container(answer)
        if gold_kind == "group":
            return same(ours[0], answer)
        if answer_kind == "group":
            return same(gold, theirs[0])
        if gold_kind == "set" and len(ours) == 1 and answer_kind is None:
            return same(ours[0], answer)
        if answer_kind == "set" and len(theirs) == 1 and gold_kind is None:
            return same(gold, theirs[0])
        if gold_kind in ("list", "set") or answer_kind in ("list", "set"):
            return _same_collections((gold_kind, ours), (answer_kind, theirs), same)
        if gold_kind and answer_kind:
            return gold_kind == answer_kind and _in_order(ours, theirs, same)
        if (gold_kind or answer_kind) and not (_SET_NOTATION.search(gold) or _SET_NOTATION.search(answer)):
            return False
    return _same_leaf(gold, answer)


def _numbers(gold: str, answer: str) -> bool | None:
    (gold, gold_unit), (answer, answer_unit) = split_unit(gold), split_unit(answer)
    one, other = read_number(gold), read_number(answer)
    if one is None or other is None:
        return None
    return same_number(one, other) and same_unit(gold_unit, answer_unit)


def _without_names(gold: str, answer: str) -> tuple[str, str]:
    """Return both without `x =` where only one has it, or where both name the same; chains keep their last member."""
    ours, theirs = _EQUALS.split(gold), _EQUALS.split(answer)
    if any("," in part and not _name(part) for part in (*ours[:-1], *theirs[:-1])):
        return gold, answer
    if len(ours) == 2 and len(theirs) == 2 and _name(ours[0]) and squeezed(ours[0]) == squeezed(theirs[0]):
        return ours[1], theirs[1]
    if len(ours) == 1 and len(theirs) > 1:
        return gold, theirs[-1]
    if len(theirs) == 1 and len(ours) > 1 and _name(ours[0]):
        return ours[-1], answer
    return gold, answer


def _name(text: str) -> bool:
    return _NAME.fullmatch(text.strip()) is not None


def split_top(text: str, separator: str = ",") -> list[str]:
    r"""Return the parts of a text between separators that stand outside of all brackets.

    >>> split_top(r"1, (2, 3), \{4, 5\}")
    ['1', '(2, 3)', '\\{4, 5\\}']
    """
    parts, depth, start, i = [], 0, 0, 0
    while i < len(text):
        if text.startswith(("\\begin", "\\end"), i):
            depth += 1 if text.startswith("\\begin", i) else -1
        if text[i] in _OPEN:
            depth += 1
        elif text[i] in _CLOSE:
            depth -= 1
        elif depth == 0 and text.startswith(separator, i):
            parts.append(text[start:i].strip())
            start = i + len(separator)
        i += 1
    return [*parts, text[start:].strip()]


def _container(text: str) -> tuple[str | None, list[str]]:
    r"""Return what kind of collection a text is, and its members.

    Kinds: `list` (commas or semicolons without brackets, or a ±), `set` (braces), `group` (brackets around one member),
    one of `()`, `(]`, `[)`, `[]`, or None for a single thing. Braces without backslashes are not printed: `{1,3}` is
    a list.
    """
    text = text.strip()
    if text == r"\emptyset":
        return "set", []
    if read_number(text) is not None:  # its commas are thousands
        return None, []
    united = split_top(text, r"\cup")
    sets = [_container(part) for part in united] if len(united) > 1 else []
    if sets and all(kind == "set" for kind, _ in sets):
        return "set", list(dict.fromkeys(member for _, union in sets for member in union))
    members = _members(text)
    if (words := _WORDS.fullmatch(text)) and "," in words[1]:
        members = [rf"\text{{{member.strip()}}}" for member in words[1].split(",")]
    if len(members) > 1:
        return ("list", members) if all(members) else (None, [])
    if text.count(r"\pm") == 1 and "\\mp" not in text:
        return "list", [_replaced(text, r"\pm", "+"), _replaced(text, r"\pm", "-")]
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
    if len(members) == 1 and kind in ("()", "[]", "list"):
        return "group", members
    return (kind, members) if all(members) else (None, [])


def _members(text: str) -> list[str]:
    """Return the members of a collection: those between semicolons, else those between commas."""
    members = split_top(text, ";")
    return members if len(members) > 1 else split_top(text)


def _closed(inside: str) -> bool:
    """Return whether no bracket of `inside` closes one that was opened before it."""
    depth = 0
    for character in inside:
        depth += (character in _OPEN) - (character in _CLOSE)
        if depth < 0:
            return False
    return depth == 0


def _replaced(text: str, sign: str, by: str) -> str:
    before, _, after = text.partition(sign)
    return f"{before}{by}{after}" if before.strip() or by == "-" else after


def _same_collections(gold: tuple[str | None, list[str]], answer: tuple[str | None, list[str]], same: Equal) -> bool:
    (gold_kind, ours), (answer_kind, theirs) = gold, answer
    if gold_kind == "()" and answer_kind == "list":
        return _in_order(ours, theirs, same)
    if gold_kind in ("list", "set") and answer_kind in ("list", "set"):
        ours, theirs = _spread(ours), _spread(theirs)
        if len(ours) != len(theirs):  # a set has each member once; a list, such as of roots, as often as it says
            ours = _distinct(ours, same) if gold_kind == "set" else ours
            theirs = _distinct(theirs, same) if "set" in (gold_kind, answer_kind) else theirs
        return _any_order(ours, theirs, same)
    return False


def _distinct(members: list[str], same: Equal) -> list[str]:
    """Return the members without those that equal an earlier one."""
    kept: list[str] = []
    for member in {squeezed(member): member for member in reversed(members)}.values():
        if not any(same(other, member) for other in kept):
            kept.append(member)
    return kept


def _spread(members: list[str]) -> list[str]:
    """Return members with `a ± b` as two."""
    spread = []
    for member in members:
        kind, both = _container(member)
        spread.extend(both if kind == "list" else [member])
    return spread


def _in_order(ours: list[str], theirs: list[str], same: Equal) -> bool:
    return len(ours) == len(theirs) and all(map(same, ours, theirs))


def _any_order(ours: list[str], theirs: list[str], same: Equal) -> bool:
    if len(ours) != len(theirs):
        return False
    left = list(theirs)
    for member in ours:
        match = next((other for other in left if same(member, other)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _same_leaf(gold: str, answer: str) -> bool:
    for pattern, compare in ((_BASED, _same_based), (_RATIO, _same_ratio)):
        (one, gold_unit), (other, answer_unit) = split_unit(gold), split_unit(answer)
        ours, theirs = pattern.fullmatch(one), pattern.fullmatch(other)
        if ours and theirs:
            return compare(ours, theirs) and same_unit(gold_unit, answer_unit)
        if pattern is _BASED and (ours or theirs):
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


def _same_based(ours: re.Match[str], theirs: re.Match[str]) -> bool:
    bases = [_BASES.get(m[2].removeprefix("\\text{").rstrip("}").strip(), m[2]) for m in (ours, theirs)]
    return bases[0] == bases[1] and ours[1].lstrip("0") == theirs[1].lstrip("0")


def _same_ratio(ours: re.Match[str], theirs: re.Match[str]) -> bool:
    if any(len(m[2]) == 2 for m in (ours, theirs)):  # a time of day
        return (int(float(ours[1])), ours[2]) == (int(float(theirs[1])), theirs[2])
    a, b, c, d = (Fraction(text) for text in (*ours.groups(), *theirs.groups()))
    return a * d == b * c


def _as_text(answer: str, marked: bool) -> str | None:
    r"""Return an answer that is words (or a choice's letter) in lower case, or None for mathematics.

    Any letters are words where one of the two answers is `marked` as text.
    """
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", answer).strip()
    if re.search(r"[\\^_=+*/<>{}|]", text) or not re.search(r"[A-Za-z]", text):
        return None
    words = re.sub(r"[^A-Za-z0-9' -]", "", text).casefold().strip()
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
