"""The reward for a right answer to a mathematical question, and where the answer stands in a completion.

What reads an answer is a single pass over the text, and what is not safe to hand to a computer algebra system is
refused: completions may be long and hostile.
"""

import math
import os
import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from lit_qrl.errors import ConfigError
from lit_qrl.rewards.base import Reward, Sample
from lit_qrl.rewards.math.equivalence import equivalent, normalize, settled, with_decimal_points
from lit_qrl.rewards.workers import Failure, WorkerPool

_ANSWER_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
# A backslash takes the next character with it, so that `\{` and `\\` are no braces. Of `\\boxed`, which is no LaTeX,
# the backslash was doubled by JSON.
_BOX_OR_BRACE = re.compile(r"\\{1,8}(?:boxed|fbox|framebox)\s*\{|\\.|[{}]", re.DOTALL)
# What may stand between the boxes of one answer: nothing, a comma, a semicolon, "and" or "or" (and before it what the
# first is, such as "for part (a)"), perhaps the next one's name.
_BETWEEN_BOXES = re.compile(
    r"(?:[$\s]|\\[()\[\],;:! ]|\\q?quad)*(?:[,;&]|(?:[^.!?:\n\\]*?[,;\s])?(?:\\+text\{\s*)?\b(?:and|or)\b(?:\s*\})?)?"
    r"(?:[$\s]|\\[()\[\],;:! ]|\\q?quad)*(?:[A-Za-z](?:_\{?\w+\}?)?\s*=\s*)?"
)
_THINKING = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)
_BARE_BOX = re.compile(r"\\boxed\s*(-?\d[\d.,/]*|[A-Za-z](?![A-Za-z]))")
# GSM8K's own mark. Only a number up to the end of the line counts: in Markdown, `####` starts a heading.
_HASH_MARK = re.compile(r"^####[ \t]{0,8}([-+]?\$?[ \t]?\d[\d.,/ ]{0,60}%?)[ \t]{0,8}$", re.MULTILINE)
# The last line that DAPO's prompt asks for, perhaps in bold.
_ANSWER_LINE = re.compile(r"(?mi)^[ \t>*_]{0,8}(?:final )?answer[ \t*_]{0,4}:[ \t*_]{0,4}(\S.{0,1000})$")
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
_EXPONENT = r"[-+]*(?:\d+(?:\.\d+)?|\\?[A-Za-z]+)"
MAX_EXPONENT = 100_000
"""Largest literal exponent: 2^{2005} is an answer, and takes no time."""


def extract_answer(text: str, last_number: bool = False) -> str | None:
    r"""Return what a text gives as its answer, or None.

    The inside of the last `<answer>…</answer>`, else of the last balanced `\boxed{…}`, else a number after `####` on
    a line of its own, else what the last line `Answer: …` says, else, if `last_number`, the last number. A box or mark
    inside the tags is opened too.

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
    for mark in (_HASH_MARK, _ANSWER_LINE):
        if found := mark.findall(text):
            return found[-1].strip(" \t\r*_")
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


def tagged_or_whole(completion: str) -> str:
    """Return the inside of a completion's last `<answer>…</answer>`, else the whole completion."""
    tagged = last_tagged(completion)
    return completion if tagged is None else tagged


def last_boxed(text: str) -> str | None:
    r"""Return the inside of the last `\boxed{…}` whose braces balance, or None.

    Boxes that stand side by side, or with nothing but a comma, a semicolon, "and" or "or" between them, are one answer
    of several members, which are joined by semicolons.

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
    bare = _BARE_BOX.findall(text)
    return bare[-1] if bare else None


def _halved(text: str, backslashes: int) -> str:
    while backslashes % 2 == 0 and backslashes:
        text, backslashes = text.replace("\\\\", "\\"), backslashes // 2
    return text


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
    found = _NUMBER.findall(text[-LAST_NUMBER_WINDOW:])
    return found[-1].rstrip(",") if found else None


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
    steps = ((one in "([{") - (one in ")]}") for one in text)
    if max(accumulate(steps, lambda depth, step: max(0, depth + step), initial=0)) > MAX_DEPTH:
        return f"more than {MAX_DEPTH} nested brackets"
    powers = re.sub(r"\^[{(]+", "^", re.sub(r"\s|\\left|\\right", "", text).replace("**", "^"))
    if re.search(rf"(?:\^{_EXPONENT}){{{MAX_TOWER}}}\^", powers):
        return "a power tower"
    # By the count of its digits first: what no number is made of can be of any length.
    exponents = (digits.replace(",", "").lstrip("0") for digits in re.findall(r"\^[-+]*([\d,]+)", powers))
    if any(len(digits) > len(str(MAX_EXPONENT)) or int(digits or 0) > MAX_EXPONENT for digits in exponents):
        return f"an exponent over {MAX_EXPONENT}"
    numeric = re.findall(r"\^(\d+)\^(\d+)", powers)
    if any(int(top) * math.log10(int(base) or 1) > math.log10(MAX_EXPONENT) for base, top in numeric):
        return "a power tower"
    if re.search(r"!\s*!\s*!|\d{6,}\s*!", text):
        return "a factorial of a large number"
    return None


MAX_WORKERS = 4
"""By default; most answers are settled without a worker."""


class MathReward(Reward):
    r"""Scores 1 for an answer equivalent to the reference, else 0.

    The answer is the inside of the last `<answer>…</answer>`, else of the last `\boxed{…}` (of several that stand side
    by side, as in `\boxed{1} and \boxed{2}`, all of them), else the number after a last `####`, else the last line
    `Answer: …`. The reference may be a whole solution, from which the answer is read in the same way. Equal numbers
    are recognized at once; all else goes to math-verify in a worker process, which is killed when it is late: that
    sample scores 0 and stands in `failures`.
    Inputs made to be slow (power towers, huge numbers, deep nesting) score 0 without being tried; what a completion
    raises all the same is its own failure.

    Args:
        weight: factor in the sum of rewards.
        last_number: without tags, box or mark, take the last number of the completion.
        skip_thinking: read the answer after `</think>` alone; thinking that does not end has none.
        decimal_comma: read `1,5` as one and a half, in answers and references; a list is then `1; 5` or `1, 5`.
        timeout: seconds for one comparison.
        workers: processes for comparisons, started when first needed; 0 takes one per CPU core, at most 4.
        name: of the metric.

    Raises:
        ConfigError: `timeout` is not positive or `workers` is negative.

    >>> MathReward()([Sample("", r"so \boxed{0.5}", "1/2"), Sample("", r"\boxed{2}", "1/2"), Sample("", "1/2", "1/2")])
    [1.0, 0.0, 0.0]
    """

    time_limit = None  # each comparison has its own
    overlaps = True

    def __init__(
        self,
        weight: float = 1.0,
        last_number: bool = False,
        skip_thinking: bool = False,
        decimal_comma: bool = False,
        timeout: float = 2.0,
        workers: int = 0,
        name: str = "math",
    ) -> None:
        if timeout <= 0:
            raise ConfigError("MathReward.timeout must be positive.", expected="seconds", given=timeout)
        if workers < 0:
            raise ConfigError("MathReward.workers is negative.", expected="a number of processes, or 0", given=workers)
        self.weight, self.name, self.last_number = weight, name, last_number
        self.skip_thinking, self.decimal_comma = skip_thinking, decimal_comma
        self.timeout, self.workers = timeout, workers or min(MAX_WORKERS, os.cpu_count() or 1)
        self.failures = {}
        self._pool = WorkerPool(equivalent, self.workers, timeout, confined=True)

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        scores = [0.0] * len(samples)
        failures: dict[int, str] = {}
        hard: dict[tuple[str, str], list[int]] = {}
        for i, sample in enumerate(samples):
            golds = self._golds(sample.reference)
            try:
                answer = self._answer(sample)
                verdicts = {(gold, answer): quick_verdict(gold, answer) for gold in golds} if answer else {}
            except Exception as error:  # whatever a completion brings about, it costs that one alone
                failures[i] = f"{type(error).__name__}: {str(error)[:200]}"
                continue
            scores[i] = float(True in verdicts.values())
            for pair, verdict in verdicts.items():
                if verdict is None and not scores[i]:
                    hard.setdefault(pair, []).append(i)
        for pair, verdict in zip(hard, self._pool.map(list(hard)), strict=True):
            if isinstance(verdict, Failure):
                failures.update(dict.fromkeys(hard[pair], f"{verdict.reason}: {pair[1][:80]!r}"))
            elif verdict:
                for i in hard[pair]:
                    scores[i] = 1.0
        self.failures = {i: why for i, why in failures.items() if scores[i] == 0}
        return scores

    def _answer(self, sample: Sample) -> str | None:
        text = after_thinking(sample.completion, sample.prompt) if self.skip_thinking else sample.completion
        answer = extract_answer(text, self.last_number)
        return with_decimal_points(answer) if answer and self.decimal_comma else answer

    def _golds(self, reference: Any) -> list[str]:
        golds = gold_answers(reference)
        return [with_decimal_points(gold) for gold in golds] if self.decimal_comma else golds

    def unscorable(self, sample: Sample) -> str | None:
        """Return why no completion of a row could score, or None: its gold answer is missing or cannot be read."""
        try:
            golds = self._golds(sample.reference)
        except ValueError as error:
            return str(error)
        problems = [unreadable(gold) for gold in golds]
        return "its list of answers is empty" if not golds else problems[0] if all(problems) else None

    def close(self) -> None:
        """Kill the workers; a later call starts new ones."""
        self._pool.close()


def gold_answers(reference: Any) -> list[str]:
    r"""Return the answers that count as right: of a list each entry, of a solution text what it marks as its answer.

    >>> gold_answers("2 + 2 = 4\n#### 4"), gold_answers(27.0), gold_answers(["1/2", "0.5"])
    (['4'], ['27.0'], ['1/2', '0.5'])
    """
    if isinstance(reference, (list, tuple)):
        return [answer for entry in reference for answer in gold_answers(entry)]
    if reference is None or not str(reference).strip():
        raise ValueError(
            f"MathReward needs a reference for every sample. Expected: a gold answer. Given: {reference!r}. "
            "Name the column of the answers in the task."
        )
    text = str(reference)
    return [extract_answer(text) or text.strip()]


_SENTENCES = re.compile(r"[a-z)\d}$][.!?]\s+(?:[A-Z][a-z]|I\s)|\n\s*\n")
_NUMBER_WORD = (
    "zero|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen|"
    "(?:twen|thir|for|fif|six|seven|eigh|nine)ty|hundred|thousand|[mb]illion"
)
_IN_WORDS = re.compile(rf"(?:(?:{_NUMBER_WORD}|one|an?|and)(?:[\s,-]+|$))*(?:{_NUMBER_WORD})", re.IGNORECASE)


def unreadable(gold: str) -> str | None:
    r"""Return why a gold answer scores 0 even against itself, or is a text from which no answer can be read, or None.

    >>> unreadable(r"\frac{1}{2"), unreadable("She has 3. Then she buys 4."), unreadable(r"x \in (1,2]")
    ('its brackets do not match', 'it is a text that marks no answer', None)
    """
    if reason := refuse(gold):
        return reason
    boxed = extract_answer(rf"\boxed{{{gold}}}")
    if boxed is None or not quick_verdict(gold, boxed):
        return "its brackets do not match"
    if not normalize(gold):
        return "nothing is left of it without layout"
    if _IN_WORDS.fullmatch(gold.strip()):
        return "it is a number in words, which an answer gives in digits"
    return "it is a text that marks no answer" if _SENTENCES.search(gold) else None


def quick_verdict(gold: str, answer: str) -> bool | None:
    """Return whether an answer is right where that is clear without algebra, else None.

    >>> quick_verdict("72", "72.0"), quick_verdict("7", "9**9**9**9"), quick_verdict("x+1", "1+x")
    (True, False, None)
    """
    if gold == answer:
        return True
    return False if refuse(answer) or refuse(gold) else settled(gold, answer)
