"""The contract of a reward: samples in, one score each out."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion to be scored.

    Args:
        prompt: the prompt's text.
        completion: the completion's text, without special tokens.
        reference: the gold answer of the row, whatever the task makes of it.
        columns: the whole row.
    """

    prompt: str
    completion: str
    reference: Any = None
    columns: dict[str, Any] = field(default_factory=dict)


class Reward(ABC):
    """Scores completions; `weight` is its factor in the sum of a task's rewards.

    A subclass sets `name` (the metric's name) and implements `__call__`.
    """

    name: str
    weight: float = 1.0

    @abstractmethod
    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """Return one finite score per sample."""

    def close(self) -> None:  # noqa: B027
        """Stop worker processes, if any."""
