"""Rewards at work on a rollout that is still being drawn."""

import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from lit_qrl.rewards.base import Reward, Sample, Score, Scoring, check_names
from lit_qrl.rewards.service import Clock


class Early:
    """The rewards of a task that score samples as they come.

    Args:
        rewards: of the task; those that want all samples at once are left out.

    >>> from lit_qrl.rewards.simple import ConstantReward
    >>> Early([ConstantReward(1.0)]).begun
    {}
    """

    def __init__(self, rewards: Sequence[Reward]) -> None:
        check_names(rewards)
        self.rewards = rewards
        self.begun: dict[str, Scoring] = {}
        self.again()

    def again(self) -> None:
        """Begin anew: what came before is drawn once more, and scored when the call under way has returned."""
        self.drop()
        before = self.begun
        started = ((reward.name, _begun(reward, before.get(reward.name))) for reward in self.rewards)
        self.begun = {name: scoring for name, scoring in started if scoring is not None}

    def add(self, samples: Mapping[int, Sample]) -> None:
        """Take samples by their positions in the rollout."""
        for scoring in self.begun.values():
            scoring.add(samples)

    def drop(self) -> None:
        """Give up what is not done."""
        for scoring in self.begun.values():
            scoring.drop()

    @property
    def seconds(self) -> float:
        """That the rewards have worked so far, one beside another, added up."""
        return sum(scoring.seconds for scoring in self.begun.values())


def _begun(reward: Reward, before: Scoring | None) -> Scoring | None:
    scoring = reward.begin()
    if scoring is not None or not (reward.overlaps and reward.batched):
        return scoring
    return InTurn(reward, before if isinstance(before, InTurn) else None)


class InTurn:
    """A reward at work in a thread of its own: it is called for what has come since its last call.

    Args:
        reward: whose `overlaps` is True.
        before: at work on it until now, given up; what it calls returns first, so that no two threads are in a reward.
    """

    def __init__(self, reward: Reward, before: "InTurn | None" = None) -> None:
        self.reward, self._before = reward, before
        self.clock = Clock()
        self._inbox: queue.SimpleQueue[dict[int, Sample] | None] = queue.SimpleQueue()
        self._added: set[int] = set()
        self._scores: dict[int, Any] = {}
        self._failures: dict[int, str] = {}
        self._error: BaseException | None = None
        self._dropped = False
        self._thread = threading.Thread(target=self._work, name="reward", daemon=True)
        self._thread.start()

    def add(self, samples: Mapping[int, Sample]) -> None:
        """Take samples by their positions."""
        self._added.update(samples)
        self._inbox.put(dict(samples))

    def scores(self, samples: Sequence[Sample]) -> list[float] | list[Score]:
        """Return what a call with all of them returns.

        Raises:
            Exception: that the reward raised for some of them, as it would for all.
        """
        missing = {i: sample for i, sample in enumerate(samples) if i not in self._added}
        if missing:
            self.add(missing)
        self._inbox.put(None)
        try:
            while self._thread.is_alive():
                self._thread.join(1.0)
        except BaseException:
            self.drop()
            raise
        if self._error is not None:
            raise self._error
        self.reward.failures = dict(self._failures)
        return [self._scores[i] for i in range(len(samples))]

    def drop(self) -> None:
        """Give up what is not done."""
        self._dropped = True
        self._inbox.put(None)

    @property
    def seconds(self) -> float:
        """In which it was called."""
        return self.clock.seconds

    def _work(self) -> None:
        before, self._before = self._before, None
        if before is not None:
            before._thread.join()
        ended = False
        while not ended and self._error is None and not self._dropped:
            samples, ended = self._waiting()
            if not samples:
                continue
            self.clock.run(True)
            try:
                self._score(samples)
            except BaseException as error:
                self._error = error
            self.clock.run(False)

    def _waiting(self) -> tuple[dict[int, Sample], bool]:
        """Return all that has come, at least one thing, and whether nothing more does."""
        samples: dict[int, Sample] = {}
        given = self._inbox.get()
        while given is not None:
            samples |= given
            try:
                given = self._inbox.get_nowait()
            except queue.Empty:
                return samples, False
        return samples, True

    def _score(self, samples: dict[int, Sample]) -> None:
        positions = list(samples)
        returned = list(self.reward(list(samples.values())))
        if len(returned) != len(positions):
            raise ValueError(f"it returned {len(returned)} scores for {len(positions)} samples")
        self._scores.update(zip(positions, returned, strict=True))
        self._failures.update({positions[i]: why for i, why in self.reward.failures.items()})
