"""Rewards of a few lines: a constant, the reference itself, a form, an environment's score, a number in a box."""

import math
import re
from collections.abc import Sequence
from typing import Any

from lit_qrl.errors import ConfigError
from lit_qrl.rewards.base import Reward, Sample
from lit_qrl.rewards.math.reward import tagged_or_whole


class ConstantReward(Reward):
    """Scores every completion the same, so that a policy must not change beyond noise.

    Args:
        value: the score.
        weight: factor in the sum of rewards.
        name: of the metric.

    >>> ConstantReward(0.25)([Sample("a", "b"), Sample("a", "c")])
    [0.25, 0.25]
    """

    time_limit = None

    def __init__(self, value: float = 0.0, weight: float = 1.0, name: str = "constant") -> None:
        self.value, self.weight, self.name = value, weight, name

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        return [self.value] * len(samples)


class ExactMatchReward(Reward):
    """Scores 1 for an answer that is the reference, apart from white space around it, else 0.

    The answer is the inside of the last `<answer>…</answer>`, else the whole completion.

    Args:
        weight: factor in the sum of rewards.
        name: of the metric.

    >>> answers = ["348", " 348 ", "345", "So it is <answer>348</answer>."]
    >>> ExactMatchReward()([Sample("314:", answer, reference="348") for answer in answers])
    [1.0, 1.0, 0.0, 1.0]
    """

    batched = False
    time_limit = None

    def __init__(self, weight: float = 1.0, name: str = "exact_match") -> None:
        self.weight, self.name = weight, name

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        pairs = ((tagged_or_whole(sample.completion), str(sample.reference)) for sample in samples)
        return [float(answer.strip() == gold.strip()) for answer, gold in pairs]

    def unscorable(self, sample: Sample) -> str | None:
        empty = sample.reference is None or not str(sample.reference).strip()
        return "its reference is empty" if empty else None


MAX_PATTERN_INPUT = 20_000
"""Characters of a completion that a user's pattern sees: a bound on what a slow pattern costs."""
PATTERN_SECONDS = 1.0
"""Limit for one match of a user's pattern, which may take time that is exponential in its input."""


class FormatReward(Reward):
    """Scores 1 for a completion in the wanted form, else 0.

    Either `tags`: each stands exactly once, closed, in this order, with nothing but white space outside of them and
    something inside. Or `pattern`: a regular expression that must match the whole completion.

    Args:
        tags: names of the tags, without angle brackets; empty when `pattern` is given.
        pattern: regular expression (`.` matches newlines), in place of `tags`.
        opened: the prompt ends with the first tag already open.
        weight: factor in the sum of rewards.
        name: of the metric.

    Raises:
        ConfigError: the pattern is not a regular expression, or a tag not a name.

    >>> FormatReward(["think", "answer"])([Sample("", "<think>a</think> <answer>b</answer>"), Sample("", "b")])
    [1.0, 0.0]
    """

    batched = False
    time_limit = None

    def __init__(
        self,
        tags: Sequence[str] = ("think", "answer"),
        pattern: str = "",
        opened: bool = False,
        weight: float = 1.0,
        name: str = "format",
    ) -> None:
        self.weight, self.name, self.tags, self.opened = weight, name, tuple(tags), opened
        wrong = [tag for tag in self.tags if not re.fullmatch(r"[A-Za-z][\w-]*", tag)]
        if not pattern and (wrong or not self.tags):
            raise ConfigError(
                "FormatReward.tags are not names.",
                expected="names without angle brackets, such as [think, answer]",
                given=list(self.tags),
            )
        try:
            self.pattern = re.compile(pattern, re.DOTALL) if pattern else None
            self.time_limit = PATTERN_SECONDS if pattern else None
        except re.error as error:
            raise ConfigError(
                "FormatReward.pattern is not a regular expression.", expected="Python's syntax", given=error
            ) from error

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        return [float(self.is_met(sample.completion)) for sample in samples]

    def is_met(self, completion: str) -> bool:
        """Return whether a completion has the form."""
        if self.pattern is not None:
            return self.pattern.fullmatch(completion[:MAX_PATTERN_INPUT]) is not None
        rest = f"<{self.tags[0]}>{completion}" if self.opened else completion
        if any(rest.count(bracket) != 1 for tag in self.tags for bracket in (f"<{tag}>", f"</{tag}>")):
            return False
        for tag in self.tags:
            before, _, rest = rest.partition(f"<{tag}>")
            inside, closed, rest = rest.partition(f"</{tag}>")
            if before.strip() or not closed or not inside.strip():
                return False
        return not rest.strip()


class EpisodeReward(Reward):
    """Returns the environment's own score of each conversation; one without is left out.

    Args:
        weight: factor in the sum of rewards.
        name: of the metric.

    >>> from lit_qrl.types import Episode
    >>> played = Episode(score=0.5, ended="done", turns=2)
    >>> EpisodeReward()([Sample("", "", episode=played)])
    [0.5]
    """

    def __init__(self, weight: float = 1.0, name: str = "episode") -> None:
        self.weight, self.name = weight, name

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        """Return one score per sample; None where the environment failed.

        Raises:
            ConfigError: the task has no environment.
        """
        if any(sample.episode is None for sample in samples):
            raise ConfigError(
                "EpisodeReward needs a task with an environment.",
                expected="a MultiTurnTask under data.task",
                remedy="Remove it from the rewards.",
            )
        return [sample.episode.score for sample in samples if sample.episode is not None]


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
