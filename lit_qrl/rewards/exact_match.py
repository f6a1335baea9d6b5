"""The reward of an answer that is right when it is the reference, character for character."""

from collections.abc import Sequence

from lit_qrl.rewards.base import Reward, Sample
from lit_qrl.rewards.math.answers import last_tagged


class ExactMatchReward(Reward):
    """Scores 1 for an answer that is the reference, apart from white space around it, else 0.

    The answer is the inside of the last `<answer>…</answer>`, else the whole completion.

    Args:
        weight: factor in the sum of rewards.
        name: of the metric.

    >>> answers = ["348", " 348 ", "345", "So it is <answer>348</answer>."]
    >>> ExactMatchReward()([Sample("314:", answer, reference="348") for answer in answers])
    [1.0, 1.0, 0.0, 1.0]
    """

    batched = False
    time_limit = None

    def __init__(self, weight: float = 1.0, name: str = "exact_match") -> None:
        self.weight, self.name = weight, name

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        return [float(self._answer(sample.completion) == str(sample.reference).strip()) for sample in samples]

    def _answer(self, completion: str) -> str:
        tagged = last_tagged(completion)
        return (completion if tagged is None else tagged).strip()

    def unscorable(self, sample: Sample) -> str | None:
        empty = sample.reference is None or not str(sample.reference).strip()
        return "its reference is empty" if empty else None
