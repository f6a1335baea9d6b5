"""Completions on their way to the rewards while others are still drawn."""

import logging
from collections.abc import Callable, Mapping, Sequence

from lit_qrl.rewards.base import Sample
from lit_qrl.rewards.early import Early
from lit_qrl.types import Completion

log = logging.getLogger(__name__)


class Judging:
    """What an engine hands finished completions to.

    Args:
        early: the rewards at work.
        sample: from a completion's number, prompt-major, and the completion to what rewards see.
    """

    def __init__(self, early: Early, sample: Callable[[int, Completion], Sample]) -> None:
        self.early, self._sample = early, sample
        self._seen: dict[int, list[int]] = {}
        self._waits = False

    def __call__(self, drawn: Mapping[int, Completion]) -> None:
        """Take completions by their numbers; one that came before is known.

        What goes wrong in making a sample of one is no fault of the engine that calls: it comes up again at the end.
        """
        new = {number: one for number, one in drawn.items() if number not in self._seen}
        if self._waits or not new:
            return
        try:
            self.early.add({number: self._sample(number, one) for number, one in new.items()})
        except Exception as error:
            log.debug("The rewards wait for the last completion: %s: %s", type(error).__name__, error)
            self._waits = True
        self._seen.update({number: one.token_ids for number, one in new.items()})

    def again(self) -> None:
        """Forget everything: the engine died, and all are drawn once more."""
        self.early.again()
        self._seen, self._waits = {}, False

    def of(self, completions: Sequence[Completion]) -> Early:
        """Return the rewards at work on these completions; begun anew where other ones were handed out."""
        if any(completions[number].token_ids != tokens for number, tokens in self._seen.items()):
            self.again()
        return self.early

    def close(self) -> None:
        """Give up what is not done."""
        self.early.drop()

    @property
    def seconds(self) -> float:
        """That rewards have worked so far."""
        return self.early.seconds
