"""The accuracies that answers to held-out problems make."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor
from torchmetrics import Metric

from lit_qrl.functional.evaluation import effective_size, pass_at_k, wilson_interval


class PassAtK(Metric):
    """Probability that at least one of `k` samples is correct, mean over problems, or an end of its 95 % interval.

    Without bias from `n ≥ k` samples (`functional.evaluation.pass_at_k`). The interval is Wilson's for one sample per
    problem, and for several Wilson's with the effective size of samples that are clustered by problem. With `k` = 1 the
    mean is the share of correct samples, avg@n.

    Args:
        k: samples of which one must be correct.
        part: the `mean`, or the `low` or `high` end of its interval.

    >>> metric = PassAtK(k=2)
    >>> metric.update(torch.tensor([[True, False, False, False]]))
    >>> metric.compute()
    tensor(0.5000)
    """

    full_state_update = False

    def __init__(self, k: int, part: Literal["mean", "low", "high"] = "mean") -> None:
        super().__init__()
        self.k, self.part = k, part
        for name in ("total", "squares"):
            self.add_state(name, torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("draws", torch.tensor(1), dist_reduce_fx="max")
        self.total: Tensor
        self.squares: Tensor
        self.count: Tensor
        self.draws: Tensor

    def update(self, correct: Tensor) -> None:
        """Add problems: `correct` is "problems samples" with at least `k` samples."""
        values = pass_at_k(correct, self.k)
        # Not in place: a state that `trainer.validate` reset is a tensor of its inference mode.
        self.total = self.total + values.sum()
        self.squares = self.squares + (values * values).sum()
        self.count = self.count + len(correct)
        self.draws = torch.full_like(self.draws, correct.shape[1] // self.k)

    def compute(self) -> Tensor:
        """Return the mean, or the end of its interval."""
        mean = self.total / self.count
        if self.part != "mean":
            size = effective_size(self.total, self.squares, self.count, int(self.draws))
            mean = wilson_interval(mean, size)[self.part == "high"]
        return mean.float()


BOUNDS: Mapping[str, Literal["mean", "low", "high"]] = {"": "mean", "_ci_low": "low", "_ci_high": "high"}
"""What is put behind the name of an accuracy for its 95 % interval, and which part that is."""


def is_bound(name: str) -> bool:
    """Return whether a metric is an end of another's interval.

    >>> is_bound("val/accuracy_ci_low"), is_bound("val/accuracy")
    (True, False)
    """
    return name.endswith(tuple(filter(None, BOUNDS)))


STOPPED = {"greedy": "greedy_stopped", "sampled": "stopped"}
"""By the kind of answers: the name of the share that ended by itself, not at the longest answer."""


class EvaluationMetrics(torch.nn.ModuleDict):
    """The accuracies of one set of held-out problems, each with its interval, by the name under which it is logged.

    Beside them stands the share of answers that stopped by themselves (`STOPPED`): an accuracy may rise since a policy
    learns to finish.

    Args:
        accuracies: by name, from which answers (`greedy`, `sampled`) and of how many of them one must be correct.
    """

    def __init__(self, accuracies: Mapping[str, tuple[str, int]]) -> None:
        super().__init__()
        self.accuracies = dict(accuracies)
        for name, (_, k) in self.accuracies.items():
            for suffix, part in BOUNDS.items():
                self[name + suffix] = PassAtK(k, part)
        for kind in dict.fromkeys(kind for kind, _ in self.accuracies.values()):
            self[STOPPED[kind]] = PassAtK(1)

    def add(self, correct: Mapping[str, Tensor], stopped: Mapping[str, Tensor]) -> None:
        """Add problems by the kind of answers: "problems n", True where one is correct, and where it stopped."""
        for name, (kind, _) in self.accuracies.items():
            for suffix in BOUNDS:
                self[name + suffix].update(correct[kind])  # pyright: ignore[reportCallIssue]
        for kind, grid in stopped.items():
            self[STOPPED[kind]].update(grid)  # pyright: ignore[reportCallIssue]
