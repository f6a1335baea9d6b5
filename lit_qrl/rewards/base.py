"""The contract of a reward: samples in, one score each out."""

import logging
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lit_qrl.errors import ConfigError
from lit_qrl.run.description import Described

log = logging.getLogger(__name__)


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


class Reward(Described, ABC):
    """Scores completions; `weight` is its factor in the sum of a task's rewards.

    A subclass sets `name` (the metric's name; by default the class's) and implements `__call__`. `failures` holds,
    after a call, the positions of samples that could not be scored (a timeout) and why; they have some finite score
    all the same, which `score_all` replaces.
    """

    name: str
    weight: float = 1.0
    failures: Mapping[int, str] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not hasattr(cls, "name"):
            cls.name = cls.__name__

    @abstractmethod
    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """Return one finite score per sample."""

    def close(self) -> None:
        """Stop worker processes, if any."""


class Scores(NamedTuple):
    """What `score_all` returns.

    Args:
        total: one weighted sum per sample, or the error reward.
        parts: by reward name, one score per sample before its weight.
        errors: number of samples with at least one failed reward.
    """

    total: list[float]
    parts: dict[str, list[float]]
    errors: int


def check_names(rewards: Sequence[Reward]) -> None:
    """Raise `ConfigError` when there is no reward or two share the name under which they are logged."""
    if not rewards:
        raise ConfigError("The task has no reward.", expected="at least one", remedy="List one under `rewards`.")
    twice = [name for name, count in Counter(reward.name for reward in rewards).items() if count > 1]
    if twice:
        raise ConfigError(
            f"Two rewards are both named {twice[0]!r}.",
            expected="distinct names, since each is a metric",
            remedy="Remove one, or give it another `name`.",
        )


def score_all(rewards: Sequence[Reward], samples: Sequence[Sample], error_reward: float = 0.0) -> Scores:
    """Return the weighted sum of all rewards for each sample, and the parts.

    A reward that raises is called again sample by sample, so that one bad sample costs only itself: it scores
    `error_reward` as a whole and is counted. So do the samples that a reward lists in `failures`.

    Args:
        rewards: summed as Σ weight · score.
        samples: the completions.
        error_reward: total of a sample with a failed reward, and its part.

    Raises:
        ConfigError: a reward returned the wrong number of scores, or one that is not a finite number.

    >>> from lit_qrl.rewards.constant import ConstantReward
    >>> score_all([ConstantReward(0.5, weight=2.0)], [Sample("1+1=", "2")])
    Scores(total=[1.0], parts={'constant': [0.5]}, errors=0)
    """
    check_names(rewards)
    total = [0.0] * len(samples)
    parts: dict[str, list[float]] = {}
    failed: set[int] = set()
    for reward in rewards:
        scores, failures = _score(reward, samples, error_reward)
        parts[reward.name] = scores
        failed.update(failures)
        if failures:
            position, why = next(iter(sorted(failures.items())))
            log.warning(
                "Reward %r failed on %d of %d samples; the first (%d): %s",
                reward.name,
                len(failures),
                len(samples),
                position,
                why,
            )
        for i, score in enumerate(scores):
            total[i] += reward.weight * score
    for i in failed:
        total[i] = error_reward
    return Scores(total, parts, len(failed))


def _score(reward: Reward, samples: Sequence[Sample], error_reward: float) -> tuple[list[float], dict[int, str]]:
    failures: dict[int, str] = {}
    try:
        returned: Any = reward(samples)
    except Exception:
        returned = []
        for i, sample in enumerate(samples):
            try:
                returned.append(_checked(reward, reward([sample]), 1)[0])
                if reward.failures:
                    failures[i] = reward.failures[0]
            except ConfigError:
                raise
            except Exception as error:
                failures[i] = f"{type(error).__name__}: {error}"
                returned.append(error_reward)
    else:
        failures.update(reward.failures)
    scores = _checked(reward, returned, len(samples))
    for i in failures:
        scores[i] = error_reward
    return scores, failures


def _checked(reward: Reward, returned: Any, count: int) -> list[float]:
    who = f"Reward {reward.name!r} ({type(reward).__name__})"
    try:
        given = len(returned)
    except TypeError:
        given = f"a {type(returned).__name__}"
    if given != count:
        raise ConfigError(
            f"{who} returned the wrong number of scores.",
            expected=f"{count}, one for each sample",
            given=given,
            remedy="Return a list as long as `samples`.",
        )
    scores = []
    for i, score in enumerate(returned):
        try:
            scores.append(float(score))
        except (TypeError, ValueError):
            scores.append(math.nan)
        if not math.isfinite(scores[-1]):
            raise ConfigError(
                f"{who} returned a score that is not a finite number.",
                expected="a finite number for every sample",
                given=f"{score!r} for sample {i}",
                remedy="Return 0.0 for what cannot be judged, or raise an exception, which counts as an error.",
            )
    return scores
