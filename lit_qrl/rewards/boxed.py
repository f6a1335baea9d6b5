"""The plainest reward of a worked answer: a function of completions and answers, for this trainer and for TRL's."""

import math
import re
from collections.abc import Sequence
from typing import Any

BOX = re.compile(r"\\boxed\{([^{}]*)\}")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def boxed_number(completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float]:
    r"""Return 1 for each completion whose last `\boxed{}` holds the number that its answer ends with, else 0.

    Of a box and of an answer the last number counts; commas between digits do not. So GSM8K's column `answer`, which
    ends with `#### 42`, is taken as it is.

    Args:
        completions: texts, or lists of messages of which the last one counts.
        answer: gold answers, one for each.
        columns: the row's other columns; not looked at.

    >>> boxed_number([r"so \\boxed{1,042}", r"\\boxed{1042.0 \\text{ dollars}}", "1042"], ["… #### 1042"] * 3)
    [1.0, 0.0, 0.0]
    >>> boxed_number([[{"role": "assistant", "content": r"\\boxed{x = 7}"}]], ["#### 7"])
    [1.0]
    """
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    pairs = zip(texts, answer, strict=True)
    return [float(_agree((BOX.findall(text) or [""])[-1], str(gold))) for text, gold in pairs]


def _agree(given: str, gold: str) -> bool:
    one, other = _last_number(given), _last_number(gold)
    return one is not None and other is not None and math.isclose(one, other, rel_tol=0.0, abs_tol=1e-6)


def _last_number(text: str) -> float | None:
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None
