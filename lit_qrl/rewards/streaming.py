"""Rewards at work on a rollout that is still being drawn."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lit_qrl.rewards.base import Reward, Sample, Score, Scoring, check_names
from lit_qrl.rewards.limit import Running, call, in_thread
from lit_qrl.types import Completion

log = logging.getLogger(__name__)


class StreamingRewards:
    """The rewards of one rollout, those of which score samples as they come that can; an engine hands them over.

    Args:
        rewards: of the task, none where nothing streams; those that want all samples at once are left out.
        sample: from a completion's number, prompt-major, and the completion to what rewards see.
        early: whether completions are handed over while others are drawn, of which samples are made meanwhile.
    """

    def __init__(
        self, rewards: Sequence[Reward], sample: Callable[[int, Completion], Sample], early: bool = True
    ) -> None:
        if rewards:
            check_names(rewards)
        self._rewards, self._sample, self.early = rewards, sample, early
        self.begun: dict[str, Scoring] = {}
        self.again()

    @property
    def streams(self) -> bool:
        """True where some take samples as they come."""
        return bool(self.begun)

    @property
    def seconds(self) -> float:
        """That the rewards have worked so far, one beside another, added up."""
        return sum(scoring.seconds for scoring in self.begun.values())

    def again(self) -> None:
        """Begin anew: what came before is drawn once more, and scored when the call under way has returned."""
        self.close()
        before = self.begun
        started = ((reward.name, _begun(reward, before.get(reward.name))) for reward in self._rewards)
        self.begun = {name: scoring for name, scoring in started if scoring is not None}
        self._made: dict[int, tuple[list[int], Sample]] = {}
        """By number the tokens that came, and what rewards see of them."""
        self._waits = False

    def __call__(self, drawn: Mapping[int, Completion]) -> None:
        """Take completions by their numbers; one that came before is known.

        What goes wrong in making a sample of one is no fault of the engine that calls: it comes up again at the end.
        """
        new = {number: one for number, one in drawn.items() if number not in self._made}
        if self._waits or not new:
            return
        try:
            samples = {number: self._sample(number, one) for number, one in new.items()}
        except Exception as error:
            log.debug("The rewards wait for the last completion: %s: %s", type(error).__name__, error)
            self._waits = True
            return
        self._made |= {number: (one.token_ids, samples[number]) for number, one in new.items()}
        for scoring in self.begun.values():
            scoring.add(samples)

    def begun_with(self, completions: Sequence[Completion]) -> dict[str, Scoring]:
        """Return by name the rewards at work on all completions; begun anew where other ones were handed out."""
        if any(completions[number].token_ids != tokens for number, (tokens, _) in self._made.items()):
            self.again()
        return self.begun

    def samples(self, completions: Sequence[Completion]) -> list[Sample]:
        """Return what rewards see of all completions, of which `begun_with` knows: made once of each."""
        made = ((number, one, self._made.get(number)) for number, one in enumerate(completions))
        return [self._sample(number, one) if known is None else known[1] for number, one, known in made]

    def close(self) -> None:
        """Give up what is not done."""
        for scoring in self.begun.values():
            scoring.drop()


def _begun(reward: Reward, before: Scoring | None) -> Scoring | None:
    scoring = reward.begin()
    if scoring is not None or not (reward.overlaps and reward.batched):
        return scoring
    return InTurn(reward, before.turn if isinstance(before, InTurn) else threading.Lock())


class InTurn:
    """A reward at work beside the engine: it is called for what has come since its last call, one call at a time.

    Args:
        reward: whose `overlaps` is True.
        turn: held by each call, those of what was given up too, so that no two threads are in a reward.
    """

    def __init__(self, reward: Reward, turn: threading.Lock) -> None:
        self.reward, self.turn = reward, turn
        self._worked, self._since = 0.0, None
        self._waiting: deque[tuple[int, Sample]] = deque()
        self._added: set[int] = set()
        self._running: list[Running] = []
        self._scores: dict[int, Any] = {}
        self._failures: dict[int, str] = {}
        self._dropped = False

    def add(self, samples: Mapping[int, Sample]) -> None:
        """Take samples by their positions."""
        self._added.update(samples)
        self._waiting.extend(samples.items())
        self._running.append(in_thread(self._work))

    def scores(self, samples: Sequence[Sample]) -> list[float] | list[Score]:
        """Return what a call with all of them returns.

        Raises:
            Exception: that the reward raised for some of them, as it would for all.
        """
        self.add({i: sample for i, sample in enumerate(samples) if i not in self._added})
        try:
            for running in self._running:
                running.result()
        finally:
            self.drop()
        self.reward.failures = dict(self._failures)
        return [self._scores[i] for i in range(len(samples))]

    def drop(self) -> None:
        """Give up what is not done."""
        self._dropped = True

    @property
    def seconds(self) -> float:
        """In which it was called."""
        since = self._since  # once: the other thread may end its work in between
        return self._worked + (0.0 if since is None else time.monotonic() - since)

    def _work(self) -> None:
        """Score all that has come; after an error nothing is begun again."""
        with self.turn:
            samples = {} if self._dropped else dict(self._waiting.popleft() for _ in range(len(self._waiting)))
            if not samples:
                return
            self._since = time.monotonic()
            try:
                self._score(samples)
            except BaseException:
                self.drop()
                raise
            finally:
                self._worked, self._since = self.seconds, None

    def _score(self, samples: dict[int, Sample]) -> None:
        positions = list(samples)
        returned = list(call(self.reward, list(samples.values()), seconds=self.reward.time_limit))
        if len(returned) != len(positions):
            raise ValueError(f"it returned {len(returned)} scores for {len(positions)} samples")
        self._scores.update(zip(positions, returned, strict=True))
        self._failures.update({positions[i]: why for i, why in self.reward.failures.items()})
