"""The reward for keeping to the form that the prompt asks for."""

import re
from collections.abc import Sequence

from lit_qrl.errors import ConfigError
from lit_qrl.rewards.base import Reward, Sample

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
