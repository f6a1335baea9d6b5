"""Where the answer stands in a completion, and which answers are safe to hand to a computer algebra system.

Everything here is a single pass over the text: completions may be long and hostile.
"""

import math
import re

_ANSWER_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
# A backslash takes the next character with it, so that `\{` and `\\` are no braces. Of `\\boxed`, which is no LaTeX,
# the backslash was doubled by JSON.
_BOX_OR_BRACE = re.compile(r"\\{1,8}(?:boxed|fbox|framebox)\s*\{|\\.|[{}]", re.DOTALL)
# What may stand between the boxes of one answer: a comma, a semicolon, "and" or "or", perhaps the next one's name.
_BETWEEN_BOXES = re.compile(
    r"(?:[$\s]|\\[()\[\],;:! ]|\\q?quad)*(?:[,;&]|(?:[,;]\s*)?(?:\\+text\{\s*)?\b(?:and|or)\b(?:\s*\})?)"
    r"(?:[$\s]|\\[()\[\],;:! ]|\\q?quad)*(?:[A-Za-z](?:_\{?\w+\}?)?\s*=\s*)?"
)
_THINKING = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)
_COMMAND = re.compile(r"(?<!\\)(\\+)([A-Za-z]+)")
_COMMANDS = frozenset(
    [
        "frac",
        "dfrac",
        "tfrac",
        "sqrt",
        "pi",
        "text",
        "left",
        "right",
        "cdot",
        "times",
        "div",
        "infty",
        "begin",
        "end",
        "boxed",
        "mathrm",
        "mathbf",
        "mathbb",
        "circ",
        "pm",
        "cup",
        "cap",
        "le",
        "leq",
        "ge",
        "geq",
        "ne",
        "neq",
        "in",
        "emptyset",
        "theta",
        "alpha",
        "beta",
        "sin",
        "cos",
        "tan",
        "log",
        "ln",
        "binom",
        "overline",
        "langle",
        "rangle",
        "ldots",
        "degree",
    ]
)
_BARE_BOX = re.compile(r"\\boxed\s*(-?\d[\d.,/]*|[A-Za-z](?![A-Za-z]))")
# GSM8K's own mark. Only a number up to the end of the line counts: in Markdown, `####` starts a heading.
_HASH_MARK = re.compile(r"^####[ \t]{0,8}([-+]?\$?[ \t]?\d[\d.,/ ]{0,60}%?)[ \t]{0,8}$", re.MULTILINE)
_NUMBER = re.compile(r"(?<![\w.])[-+]?\$?\d[\d,]*(?:\.\d+)?(?:/\d+)?(?:\\?%)?|(?<![\w.])[-+]?\.\d+")
MAX_BETWEEN_BOXES = 60
"""Characters between two boxes of one answer."""
LAST_NUMBER_WINDOW = 2000
"""Characters at the end of a completion in which `last_number` looks."""

MAX_LENGTH = 1000
"""Characters: the longest gold answer of MATH and OlympiadBench has under 300."""
MAX_DIGITS = 400
"""Digits in a row: more than any answer, far fewer than what makes integer arithmetic slow."""
MAX_DEPTH = 24
"""Nested brackets: gold answers have at most 6; a recursive parser's stack is safe."""
MAX_TOWER = 2
"""Nested powers: 2^{2^{3}} is an answer, 9^{9^{9^9}} an attack."""
MAX_EXPONENT = 100_000
"""Largest literal exponent: 2^{2005} is an answer, and takes no time."""


def extract_answer(text: str, last_number: bool = False) -> str | None:
    r"""Return what a text gives as its answer, or None.

    The inside of the last `<answer>…</answer>`, else of the last balanced `\boxed{…}`, else a number after `####` on
    a line of its own, else, if `last_number`, the last number. A box or mark inside the tags is opened too.

    Args:
        text: a completion or a solution.
        last_number: fall back on the last number of the text.

    >>> extract_answer(r"I think <answer>3</answer>, no: <answer>\boxed{\frac{1}{2}}</answer>.")
    '\\frac{1}{2}'
    >>> extract_answer("so 7 apples remain\n#### 7")
    '7'
    >>> extract_answer("so 7 apples remain."), extract_answer("so 7 apples remain.", last_number=True)
    (None, '7')
    """
    tagged = last_tagged(text)
    if tagged is not None:
        inner = last_boxed(tagged)
        return tagged.strip() if inner is None else inner.strip()
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    marked = None
    for match in _HASH_MARK.finditer(text):
        marked = match
    if marked is not None:
        return marked.group(1).strip()
    return find_last_number(text) if last_number else None


def last_tagged(text: str) -> str | None:
    """Return the inside of the last closed `<answer>…</answer>`, or None.

    >>> last_tagged("<answer>1</answer> <answer>2")
    '1'
    """
    opened: int | None = None
    found = None
    for match in _ANSWER_TAG.finditer(text):
        if not match.group(1):
            opened = match.end()
        elif opened is not None:
            found, opened = text[opened : match.start()], None
    return found


def last_boxed(text: str) -> str | None:
    r"""Return the inside of the last `\boxed{…}` whose braces balance, or None.

    Boxes with nothing but a comma, a semicolon, "and" or "or" between them are one answer of several members, which
    are joined by semicolons.

    >>> last_boxed(r"\boxed{1} and \boxed{\{2, \frac{1}{3}\}} but \boxed{4")
    '1; \\{2, \\frac{1}{3}\\}'
    >>> last_boxed(r"\boxed{1}, no: \boxed{2}")
    '2'
    """
    stack: list[tuple[int, int, int]] = []  # of every open brace: where it and its inside begin; a box's backslashes
    boxes: list[tuple[int, int, str]] = []
    for match in _BOX_OR_BRACE.finditer(text):
        token = match.group()
        if token == "}":
            if stack:
                begin, start, backslashes = stack.pop()
                if backslashes:
                    inside = _halved(text[start : match.start()], backslashes)
                    while boxes and boxes[-1][0] > begin:  # a box within this one
                        boxes.pop()
                    boxes.append((begin, match.end(), inside))
        elif token[-1] == "{" and (token == "{" or len(token) > 2):
            stack.append((match.start(), match.end(), token.count("\\")))
    if boxes:
        parts = [boxes.pop()]
        while (
            boxes
            and parts[0][0] - boxes[-1][1] <= MAX_BETWEEN_BOXES
            and _BETWEEN_BOXES.fullmatch(text, boxes[-1][1], parts[0][0])
        ):
            parts.insert(0, boxes.pop())
        return "; ".join(dict.fromkeys(inside.strip() for *_, inside in parts))
    bare = None
    for match in _BARE_BOX.finditer(text):
        bare = match
    return None if bare is None else bare.group(1)


def _halved(text: str, backslashes: int) -> str:
    while backslashes % 2 == 0 and backslashes:
        text, backslashes = text.replace("\\\\", "\\"), backslashes // 2
    return text


def unescaped(text: str) -> str:
    r"""Return LaTeX without the second backslashes that JSON puts; a matrix keeps the `\\` that ends its rows.

    >>> unescaped(r"\\frac{1}{2}"), unescaped(r"\begin{pmatrix} 1 \\ x \end{pmatrix}")
    ('\\frac{1}{2}', '\\begin{pmatrix} 1 \\\\ x \\end{pmatrix}')
    """
    while True:
        found = _COMMAND.findall(text)
        if any(len(run) % 2 for run, _ in found) or not any(word in _COMMANDS for _, word in found):
            return text
        text = text.replace("\\\\", "\\")


def after_thinking(completion: str, prompt: str = "") -> str:
    """Return what a completion says after its last `</think>`; nothing where its thinking does not end.

    Args:
        completion: without such tags it is returned whole.
        prompt: it may end with the tag that opens the thinking.

    >>> after_thinking("<think>perhaps 4</think>It is 5."), after_thinking("<think>perhaps 4"), after_thinking("5")
    ('It is 5.', '', '5')
    """
    thinks, begin = prompt.rstrip().lower().endswith(("<think>", "<thinking>")), 0
    for match in _THINKING.finditer(completion):
        thinks, begin = not match.group(1), match.end()
    return "" if thinks else completion[begin:]


def find_last_number(text: str) -> str | None:
    """Return the last number in the last 2,000 characters, with its sign, percent sign and thousands, or None.

    >>> find_last_number("She pays $1,250.50 in 3 weeks, so 10-5 is not the point; it is -2.")
    '-2'
    """
    found = None
    for match in _NUMBER.finditer(text[-LAST_NUMBER_WINDOW:]):
        found = match.group()
    return None if found is None else found.rstrip(",")


def refuse(text: str) -> str | None:
    """Return why an answer is not handed to the algebra system, or None when it is safe.

    >>> refuse("9**9**9**9")
    'a power tower'
    >>> refuse("(x+1)^2") is None
    True
    """
    if len(text) > MAX_LENGTH:
        return f"longer than {MAX_LENGTH} characters"
    if re.search(rf"\d{{{MAX_DIGITS + 1}}}", text):
        return f"a number of more than {MAX_DIGITS} digits"
    if any(ord(c) < 32 and c not in "\t\n\r" for c in text):
        return "control characters"
    if _depth(text) > MAX_DEPTH:
        return f"more than {MAX_DEPTH} nested brackets"
    if _tower(text) > MAX_TOWER:
        return "a power tower"
    numeric = re.findall(r"\^[{(]?(\d+)\^[{(]?(\d+)", re.sub(r"\s", "", text).replace("**", "^"))
    if any(int(top) * math.log10(int(base) or 1) > math.log10(MAX_EXPONENT) for base, top in numeric):
        return "a power tower"
    powers = re.findall(r"(?:\^|\*\*)\s*[{(]?\s*[-+]?\s*([\d,]+)", text)
    if any(int(p.replace(",", "") or 0) > MAX_EXPONENT for p in powers):
        return f"an exponent over {MAX_EXPONENT}"
    if re.search(r"!\s*!\s*!|\d{6,}\s*!", text):
        return "a factorial of a large number"
    return None


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth = max(0, depth - 1)
    return deepest


_EXPONENT = re.compile(r"[-+]*(?:\d+(?:\.\d+)?|\\?[A-Za-z]+)")


def _tower(text: str) -> int:
    """Return the largest number of powers stacked on one another: a^b^c, a^{b^{c}} and a**b**c all give 2."""
    text = re.sub(r"\s|\\left|\\right", "", text).replace("**", "^")
    inside = [0]  # for every open bracket, the powers above which its inside stands
    chain, chain_end = 0, -1  # powers of the chain whose last exponent ends at `chain_end`
    chains: list[int | None] = []
    highest = i = 0
    while i < len(text):
        character = text[i]
        i += 1
        if character == "^":
            chain = chain + 1 if chain_end == i - 1 else 1
            highest = max(highest, inside[-1] + chain)
            if text[i : i + 1] in ("{", "("):
                inside.append(inside[-1] + chain)
                chains.append(chain)
                i += 1
            elif match := _EXPONENT.match(text, i):
                i = chain_end = match.end()
        elif character in "([{":
            inside.append(inside[-1])
            chains.append(None)
        elif character in ")]}" and chains:
            inside.pop()
            closed = chains.pop()
            if closed is not None:
                chain, chain_end = closed, i
    return highest
