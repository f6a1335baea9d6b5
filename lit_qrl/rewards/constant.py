"""A reward that teaches nothing: the control run of an experiment."""

from collections.abc import Sequence

from lit_qrl.rewards.base import Reward, Sample


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
