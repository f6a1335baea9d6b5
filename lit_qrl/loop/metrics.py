"""Sums over an iteration, and the metrics of an evaluation."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torchmetrics import Metric

from lit_qrl.types import AllReduce


class IterationMetrics:
    """Collects the scalars of one iteration without a host synchronisation until `compute`.

    Every entry is a (sum, count) pair; a plain value counts once.
    """

    def __init__(self) -> None:
        self._pairs: dict[str, Tensor] = {}

    def add(self, name: str, pair: Tensor) -> None:
        """Add a tensor of shape [2] = (sum, count) to the entry `name`."""
        pair = pair.detach().to(torch.float64) if pair.device.type == "cpu" else pair.detach().float()
        self._pairs[name] = self._pairs[name] + pair if name in self._pairs else pair

    def value(self, name: str, value: Tensor | float) -> None:
        """Add one observation of `name`."""
        value = torch.as_tensor(value)
        self.add(name, torch.stack([value.detach().float(), torch.ones_like(value, dtype=torch.float)]))

    def update(self, values: Mapping[str, Tensor | float]) -> None:
        """Add one observation of each entry."""
        for name, value in values.items():
            self.value(name, value)

    def compute(self, all_reduce: AllReduce) -> dict[str, float]:
        """Return the means over all ranks and start anew; an entry that counted nothing is left out."""
        if not self._pairs:
            return {}
        names = sorted(self._pairs)
        device = next(iter(self._pairs.values())).device
        stacked = all_reduce(torch.stack([self._pairs[name].to(device) for name in names])).tolist()
        self._pairs = {}
        return {name: total / count for name, (total, count) in zip(names, stacked, strict=True) if count}


class AverageAtK(Metric):
    """Mean share of correct samples (avg@k), over problems.

    >>> metric = AverageAtK()
    >>> metric.update(torch.tensor([[True, False], [True, True]]))
    >>> metric.compute()
    tensor(0.7500)
    """

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")
        self.total: Tensor
        self.count: Tensor

    def update(self, correct: Tensor) -> None:
        """Add problems: `correct` is "problems samples", True where the sample solves its problem."""
        self.total += correct.float().mean(dim=1).sum()
        self.count += len(correct)

    def compute(self) -> Tensor:
        """Return the mean."""
        return self.total / self.count


class PassAtK(Metric):
    """Probability that at least one of `k` samples is correct, without bias from `n ≥ k` samples.

    pass@k = mean over problems of 1 − C(n−c, k) / C(n, k), with c correct among n.

    >>> metric = PassAtK(k=2)
    >>> metric.update(torch.tensor([[True, False, False, False]]))
    >>> metric.compute()
    tensor(0.5000)
    """

    full_state_update = False

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")
        self.total: Tensor
        self.count: Tensor

    def update(self, correct: Tensor) -> None:
        """Add problems: `correct` is "problems samples" with at least `k` samples."""
        n = correct.shape[1]
        if n < self.k:
            raise ValueError(f"pass@{self.k} needs at least {self.k} samples per problem, got {n}.")
        wrong = n - correct.double().sum(dim=1)
        factors = torch.stack([((wrong - i) / (n - i)).clamp(min=0) for i in range(self.k)])
        self.total += (1 - factors.prod(dim=0)).sum().float()
        self.count += len(correct)

    def compute(self) -> Tensor:
        """Return the mean."""
        return self.total / self.count
