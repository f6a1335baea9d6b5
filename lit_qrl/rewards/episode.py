"""The score that an environment gave a conversation, as a reward."""

from collections.abc import Sequence

from lit_qrl.errors import ConfigError
from lit_qrl.rewards.base import Reward, Sample


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
