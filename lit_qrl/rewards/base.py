"""The contract of a reward: samples in, one score each out."""

import logging
import math
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from lit_qrl.errors import ConfigError, StoppedError, nearest
from lit_qrl.rewards.limit import call
from lit_qrl.run.description import Described

if TYPE_CHECKING:
    from torch import Tensor

    from lit_qrl.types import Episode

log = logging.getLogger(__name__)

MAX_FAILED_CALLS = 3
"""Calls in a row of a reward that has worked before which may fail until the run stops."""

MAX_SCORE = 1e18
"""Largest size of a score, and of one times its weight: in a group's variance a larger one leaves fp32's range."""

Score = float | None
"""None is no score: the sample is left out of its group's statistics."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion to be scored.

    Args:
        prompt: the prompt's text.
        completion: the completion's text, without special tokens.
        reference: the gold answer of the row, whatever the task makes of it.
        columns: the whole row.
        episode: of a conversation, how it went.
    """

    prompt: str
    completion: str
    reference: Any = None
    columns: dict[str, Any] = field(default_factory=dict)
    episode: "Episode | None" = None


class Reward(Described, ABC):
    """Scores completions; `weight` is its factor in the sum of a task's rewards.

    A subclass sets `name` (the metric's name; by default the class's) and implements `__call__`, which returns a finite
    number for each sample, or None where it has no opinion. `failures` holds, after a call, the positions of samples
    that could not be scored and why; `score_all` replaces their scores.

    Attributes:
        batched: one call has all samples, and when it raises or is late all of them have failed: nothing is scored
            twice. With False each call has one sample, and a failure costs that one alone.
        time_limit: seconds that a call may take; None where its work is bounded by itself.
        progress: called with (samples done, samples), by a reward that takes long.
        overlaps: True where a sample's score is its own, whatever else is in the call, and calls may come from another
            thread: samples are then scored while others are still drawn. For rewards that wait, or work in processes
            of their own; what computes in this one takes its time from the engine.
    """

    name: str
    weight: float = 1.0
    batched: ClassVar[bool] = True
    singly: ClassVar[str] = "`batched = False`"
    time_limit: float | None = 600.0
    failures: Mapping[int, str] = {}
    progress: Callable[[int, int], None] | None = None
    has_scored: bool = False
    failed_calls: int = 0
    overlaps: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not hasattr(cls, "name"):
            cls.name = cls.__name__

    @abstractmethod
    def __call__(self, samples: Sequence[Sample]) -> list[float] | list[Score]:
        """Return one score per sample."""

    @property
    def described(self) -> str:
        """How errors call it."""
        return f"Reward {self.name!r} ({type(self).__name__})"

    def unscorable(self, sample: Sample) -> str | None:
        """Return why no completion of a row could score, or None; tasks ask when they read their rows.

        Args:
            sample: of the row, with an empty completion.
        """
        return None

    def begin(self) -> "Scoring | None":
        """Return what scores the samples of a rollout as they come, or None where all are scored at once."""
        return None

    def close(self) -> None:
        """Stop worker processes, if any."""


class Scoring(Protocol):
    """A reward at work on samples that come one after another."""

    def add(self, samples: Mapping[int, Sample]) -> None:
        """Take samples by their positions in the rollout."""
        ...

    def scores(self, samples: Sequence[Sample]) -> list[float] | list[Score]:
        """Return what the reward would of all samples in one call, and leave its `failures` as that would.

        Args:
            samples: of the whole rollout; those that were not added are scored now.
        """
        ...

    def drop(self) -> None:
        """Give up what is not done."""
        ...

    @property
    def seconds(self) -> float:
        """In which it had something to do, so far."""
        ...


RewardProgress = Callable[[str], Callable[[int, int], None] | None]
"""From a reward's name to what is called with (samples done, samples), or None where nothing shows it."""


class Scores(NamedTuple):
    """What `score_all` returns.

    Args:
        total: one weighted sum per sample, the error reward, or None for a sample that is left out.
        parts: by reward name, one score per sample before its weight.
        errors: number of samples with at least one failed reward.
    """

    total: list[Score]
    parts: dict[str, list[Score]]
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


def weigh_by_name(rewards: Sequence[Reward], weights: Mapping[str, float]) -> None:
    """Set the weights of rewards by their names; raise `ConfigError` for a name that none has."""
    known = {reward.name: reward for reward in rewards}
    for name, weight in weights.items():
        if name not in known:
            raise ConfigError(
                f"data.reward_weights names no reward of the task: {name!r}.", remedy=nearest(name, known)
            )
        known[name].weight = weight


def as_tensor(scores: Sequence[Score]) -> "Tensor":
    """Return scores as a tensor in which NaN stands for none."""
    import torch

    # In fp32 whatever the default dtype, which Lightning's bf16-true makes bf16 while it predicts.
    return torch.tensor([math.nan if score is None else score for score in scores], dtype=torch.float32)


def check_row(rewards: Sequence[Reward], row: Sample, where: str) -> None:
    """Raise `ConfigError` for a row on which every completion would score 0.

    Args:
        rewards: which are asked.
        row: with an empty completion.
        where: names the row.
    """
    for reward in rewards:
        why = reward.unscorable(row)
        if why is not None:
            raise ConfigError(
                f"{where} cannot be scored by {reward.described}: {why}.",
                expected="a gold answer that some completion can give",
                given=repr(row.reference)[:80],
                remedy="Correct the row or the column of the answers, or leave the row out by row_filter.",
            )


def score_all(
    rewards: Sequence[Reward],
    samples: Sequence[Sample],
    error_reward: Score = 0.0,
    group_size: int = 1,
    progress: RewardProgress | None = None,
    begun: Mapping[str, Scoring] = {},
) -> Scores:
    """Return the weighted sum of all rewards for each sample, and the parts.

    A sample whose reward failed scores `error_reward` as a whole and is counted. A reward that scores none of a
    prompt's completions (None) does not count for that prompt; a completion without a score that others of its prompt
    have, or without any, has the total None.

    Args:
        rewards: summed as Σ weight · score.
        samples: the completions, prompt-major.
        error_reward: total of a sample with a failed reward, and its part; None leaves it out.
        group_size: completions of each prompt.
        progress: from a reward's name to what shows how far it is; None where nothing does.
        begun: rewards by name that have begun with these samples already.

    Raises:
        ConfigError: a reward returned the wrong number of scores, or one that is not a finite number; or its first
            call failed, which is taken for a mistake in it.
        StoppedError: a reward failed `MAX_FAILED_CALLS` times in a row.

    >>> from lit_qrl.rewards.simple import ConstantReward
    >>> score_all([ConstantReward(0.5, weight=2.0)], [Sample("1+1=", "2")])
    Scores(total=[1.0], parts={'constant': [0.5]}, errors=0)
    """
    check_names(rewards)
    total: list[Score] = [None] * len(samples)
    parts: dict[str, list[Score]] = {}
    failed: set[int] = set()
    left_out: set[int] = set()
    for reward in rewards:
        reward.progress = None if progress is None else progress(reward.name)
        work = begun[reward.name].scores if reward.name in begun else reward
        whole = reward.batched or reward.name in begun
        scores, failures = _scored(reward, samples, work) if whole else _scored_singly(reward, samples)
        parts[reward.name] = [error_reward if i in failures else score for i, score in enumerate(scores)]
        failed.update(failures)
        if failures:
            position, why = min(failures.items())
            text = "Reward %r failed on %d of %d samples; the first (%d): %s"
            log.warning(text, reward.name, len(failures), len(samples), position, why)
        for start in range(0, len(samples), group_size):
            group = range(start, min(start + group_size, len(samples)))
            missing = [i for i in group if scores[i] is None and i not in failures]
            if len(missing) < len(group):
                left_out.update(missing)
        for i, score in enumerate(scores):
            if score is not None:
                total[i] = (total[i] or 0.0) + reward.weight * score
    for i in left_out:
        total[i] = None
    for i in failed:
        total[i] = error_reward
    if samples and not failed and all(score is None for score in total):
        names = ", ".join(repr(reward.name) for reward in rewards)
        log.warning("None of %d completions has a score (reward %s): nothing is learned of them.", len(total), names)
    return Scores(total, parts, len(failed))


def _scored(
    reward: Reward, samples: Sequence[Sample], work: Callable[[Sequence[Sample]], Any]
) -> tuple[list[Score], dict[int, str]]:
    """Return the scores of one call, and the failures by position; of a call that failed, all of them.

    What is called is `work`: the reward, or what of it has begun.
    """
    try:
        returned = call(work, samples, seconds=reward.time_limit)
    except (ConfigError, StoppedError):
        raise
    except Exception as error:
        why = _told(error)
        reward.failed_calls += 1
        late = isinstance(error, TimeoutError)
        slow = "If it needs longer, raise its `time_limit`. " if late else ""
        if not reward.has_scored:
            raise ConfigError(
                f"{reward.described} failed on the first {len(samples)} samples: {why}.",
                expected="a score, or None, for each",
                given=f"samples such as {_shown(samples[0])}" if samples else None,
                remedy=f"{slow}Correct it; for what it cannot judge let it return None. With {reward.singly} it is "
                "called for one sample at a time, and a failure costs that one alone.",
            ) from error
        if reward.failed_calls >= MAX_FAILED_CALLS:
            raise StoppedError(
                f"{reward.described} failed {reward.failed_calls} times in a row, each time on all samples: {why}. "
                f"{slow}When it works again, go on with --ckpt_path last."
            ) from error
        return [None] * len(samples), dict.fromkeys(range(len(samples)), why)
    scores = checked(reward, returned, samples)
    reward.has_scored, reward.failed_calls = True, 0
    return scores, dict(reward.failures)


def _scored_singly(reward: Reward, samples: Sequence[Sample]) -> tuple[list[Score], dict[int, str]]:
    scores: list[Score] = []
    failures: dict[int, str] = {}
    for i, sample in enumerate(samples):
        try:
            returned = call(reward, [sample], seconds=reward.time_limit)
        except (ConfigError, StoppedError):
            raise
        except Exception as error:
            failures[i] = _told(error)
            scores.append(None)
        else:
            scores += checked(reward, returned, [sample], i)
            if reward.failures:
                failures[i] = reward.failures[0]
    return scores, failures


def _told(error: Exception) -> str:
    """Return an error in a line, with the place in the user's code where it came up."""
    ours = ("/lit_qrl/", "/contextlib.py", "/concurrent/futures/")  # the last two within the limit of a call
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not any(map(frame.filename.count, ours))]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())[:300].rstrip(".")
    if isinstance(error, TimeoutError) and not frames:
        return text
    return f"{type(error).__name__}: {text}{where}"


def _shown(sample: Sample) -> str:
    return f"the completion {sample.completion[:60]!r} of the prompt {sample.prompt[-60:]!r}"


def checked(reward: Reward, returned: Any, samples: Sequence[Sample], first: int = 0) -> list[Score]:
    """Return a reward's scores as numbers, or None where it gave none.

    Args:
        reward: which returned them.
        returned: what it returned.
        samples: what it was called with.
        first: position of the first of these, for an error.

    Raises:
        ConfigError: there are not as many as samples, or one is neither None nor a number of at most `MAX_SCORE`.
    """
    many = not isinstance(returned, (str, bytes, Mapping, set, frozenset))
    try:
        given: Any = len(returned) if many else f"a {type(returned).__name__}"
    except TypeError:
        given = f"a {type(returned).__name__}"
    if given != len(samples):
        raise ConfigError(
            f"{reward.described} returned the wrong number of scores.",
            expected=f"{len(samples)}, one for each sample",
            given=given,
            remedy="Return a list with one number, or None, for each sample.",
        )
    scores: list[Score] = []
    for i, score in enumerate(returned):
        try:
            scores.append(None if score is None else math.nan if isinstance(score, (str, bytes)) else float(score))
        except (TypeError, ValueError, OverflowError, RuntimeError):
            scores.append(math.nan)
        last = scores[-1]
        if last is not None and not abs(last) * max(abs(reward.weight), 1.0) <= MAX_SCORE:
            beyond = f" within fp32's range, times its weight {reward.weight:g}" if math.isfinite(last) else ""
            raise ConfigError(
                f"{reward.described} returned a score that is not a finite number{beyond}.",
                expected=f"a number of at most {MAX_SCORE:g} in size for every sample, or None",
                given=f"{score!r} for sample {first + i}, {_shown(samples[i])}",
                remedy="Return None for what cannot be judged: the sample is left out.",
            )
    return scores
