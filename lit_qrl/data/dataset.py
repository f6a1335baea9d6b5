"""One iteration as an iterable, which is how Lightning takes an epoch."""

from collections.abc import Iterator

from torch.utils.data import IterableDataset

from lit_qrl.loop.hooks import Learner
from lit_qrl.loop.iteration import iterate
from lit_qrl.types import MicroBatch


class RolloutDataset(IterableDataset):
    """Yields the micro-batches of one iteration each time it is iterated.

    It has a length, because Lightning fetches one batch ahead from a loader without one and every update would be one
    step stale; and `__iter__` is a generator, so that nothing runs before the weights of the iteration are published.
    """

    def __init__(self, learner: Learner) -> None:
        self.learner = learner

    def __len__(self) -> int:
        # Where tokens say how many micro-batches there are, `TokenBudget` tells Lightning once they are drawn: no more
        # than sequences, each of which is one at the least.
        data = self.learner.data
        return data.updates * (data.parts if data.budget is None else data.rows)

    def __iter__(self) -> Iterator[MicroBatch]:
        yield from iterate(self.learner)
