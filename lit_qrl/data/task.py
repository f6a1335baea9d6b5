"""The contract of a task: rows, prompts, rewards, and what counts as correct."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from lit_qrl.errors import ConfigError
from lit_qrl.rewards.base import Reward, RewardProgress, Sample, Score, Scores, Scoring, score_all
from lit_qrl.run.description import Described

Row = Mapping[str, Any]
Message = dict[str, Any]


class Task(Described, ABC):
    """Rows of a problem set and how they are posed and scored.

    `setup` runs before any model is loaded, so that a missing file or column is known at once.
    """

    name: str
    rewards: Sequence[Reward]
    weights: Mapping[str, float] = {}
    """How often each source of the training rows is posed, by its name; without, every row equally often."""
    tools: Sequence[Any] | None = None
    """Descriptions of tools, as chat templates take them."""
    judge: Reward | None = None
    """What decides, by a score of 1, that a completion is correct; None where no single reward does."""
    in_order: bool = False
    """Pose the training rows in their own order, as for a difficulty that rises."""

    def setup(self) -> None:
        """Read or generate the rows; raise `ConfigError` for what is missing."""

    @abstractmethod
    def train_rows(self) -> Sequence[Row]:
        """Return the rows to train on."""

    @abstractmethod
    def evaluation_rows(self) -> Sequence[Row]:
        """Return the held-out rows, disjoint from training."""

    @abstractmethod
    def prompt(self, row: Row) -> str | list[Message]:
        """Return the prompt: plain text, or chat messages for the tokenizer's chat template."""

    @abstractmethod
    def reference(self, row: Row) -> Any:
        """Return the gold answer of a row."""

    @abstractmethod
    def is_correct(self, samples: Sequence[Sample]) -> list[bool]:
        """Return for each sample whether it counts as solved in the evaluation."""

    def score(
        self,
        samples: Sequence[Sample],
        error_reward: Score = 0.0,
        group_size: int = 1,
        progress: RewardProgress | None = None,
        begun: Mapping[str, Scoring] | None = None,
    ) -> Scores:
        """Return what the rewards say of samples, as `score_all` does; of `streaming` ones some have `begun`."""
        return score_all(self.rewards, samples, error_reward, group_size, progress, begun or {})

    @property
    def streaming(self) -> Sequence[Reward]:
        """Rewards that may take samples while others are drawn; none where `score` is the task's own."""
        return self.rewards if type(self).score is Task.score else ()

    def key(self, row: Row) -> str:
        """Return what identifies a problem: none is both trained on and a benchmark's. By default its prompt."""
        return normalized(self.prompt(row))

    def source(self, row: Row) -> str:
        """Return the name of the source that a training row is from, where there are several."""
        return self.name

    def close(self) -> None:
        """Stop the rewards' worker processes."""
        for reward in self.rewards:
            reward.close()


class ListedTask(Task):
    """A task whose rows are lists, which `setup` fills, and whose `judge` decides what counts as solved."""

    judge: Reward  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self) -> None:
        self._train: Sequence[Row] = []
        self._evaluation: Sequence[Row] = []

    def check_sizes(self, **sizes: int) -> None:
        """Raise `ConfigError` for a size below 1."""
        for what, value in sizes.items():
            if value < 1:
                raise ConfigError(f"{type(self).__name__}'s {what} is too small.", expected="1 or more", given=value)

    def train_rows(self) -> Sequence[Row]:
        self.setup()
        return self._train

    def evaluation_rows(self) -> Sequence[Row]:
        self.setup()
        return self._evaluation

    def is_correct(self, samples: Sequence[Sample]) -> list[bool]:
        return solved(self.judge, samples)


def normalized(prompt: str | Sequence[Message]) -> str:
    """Return a prompt without what makes no other problem of it: system turns, space and case.

    >>> normalized([{"role": "system", "content": "Think."}, {"role": "user", "content": "How  many?"}])
    'how many?'
    """
    if not isinstance(prompt, str):
        prompt = "\n".join(str(message.get("content")) for message in prompt if message["role"] != "system")
    return " ".join(prompt.split()).casefold()


def solved(judge: Reward, samples: Sequence[Sample]) -> list[bool]:
    """Return for each sample whether a reward scores it 1; one that cannot be scored fails alone.

    >>> from lit_qrl.rewards.puzzles import CountdownReward
    >>> row = {"numbers": [3, 5, 7], "target": 22}
    >>> solved(CountdownReward(), [Sample("", "3*5+7", columns=row), Sample("", "3*5+7")])
    [True, False]
    """
    return [score is not None and score >= 1.0 for score in score_all([judge], samples).parts[judge.name]]
