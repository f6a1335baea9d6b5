"""Sums over an iteration, and the metrics of an evaluation."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torchmetrics import Metric

from lit_qrl.functional.evaluation import effective_size, pass_at_k, wilson_interval
from lit_qrl.run.meeting import gather_objects
from lit_qrl.types import AllReduce


class IterationMetrics:
    """Collects the scalars of one iteration without a host synchronisation until `compute`.

    Every entry is a (sum, count) pair; a plain value counts once. Pairs of all ranks are added, so that an entry is the
    mean over what all of them observed.
    """

    def __init__(self) -> None:
        self._pairs: dict[str, Tensor] = {}
        self._totals: set[str] = set()

    def add(self, name: str, pair: Tensor) -> None:
        """Add a tensor of shape [2] = (sum, count) to the entry `name`."""
        pair = pair.detach().to(torch.float64) if pair.device.type == "cpu" else pair.detach().float()
        self._pairs[name] = self._pairs[name] + pair if name in self._pairs else pair

    def value(self, name: str, value: Tensor | float) -> None:
        """Add one observation of `name`."""
        value = torch.as_tensor(value)
        self.add(name, torch.stack([value.detach().float(), torch.ones_like(value, dtype=torch.float)]))

    def values(self, name: str, values: Tensor) -> None:
        """Add one observation for each of the values that is not NaN."""
        given = ~values.isnan()
        self.add(name, torch.stack([torch.where(given, values, 0.0).double().sum(), given.sum().double()]))

    def total(self, name: str, value: Tensor | float) -> None:
        """Add to an entry that is the sum of what all ranks counted in the iteration, not a mean."""
        self._totals.add(name)
        value = torch.as_tensor(value, dtype=torch.float)
        self.add(name, torch.stack([value, torch.zeros_like(value)]))

    def update(self, values: Mapping[str, Tensor | float]) -> None:
        """Add one observation of each entry."""
        for name, value in values.items():
            self.value(name, value)

    def compute(self, all_reduce: AllReduce) -> dict[str, float]:
        """Return the means and totals over all ranks and start anew; a mean of nothing is left out."""
        # One rank alone may have an entry, such as the probe of an engine that it had to build again.
        seen = gather_objects((set(self._pairs), self._totals))
        names, totals = (set[str]().union(*found) for found in zip(*seen, strict=True))
        if not names:
            return {}
        device = next((pair.device for pair in self._pairs.values()), torch.device("cpu"))
        nothing, held = torch.zeros(2, dtype=torch.float64), dict(self._pairs)
        away = [name for name, pair in held.items() if pair.device.type != "cpu"]
        if away:  # all at once: each copy would wait for the device
            held |= zip(away, torch.stack([held[name] for name in away]).cpu().double(), strict=True)
        stacked = torch.stack([held.get(name, nothing) for name in sorted(names)]).to(device)
        stacked = all_reduce(stacked).tolist()
        self._pairs, self._totals = {}, set()
        found = zip(sorted(names), stacked, strict=True)
        return {name: sum_ / (count or 1) for name, (sum_, count) in found if count or name in totals}


def log_row(trainer: Any, row: Mapping[str, float]) -> None:
    """Give an iteration's metrics to the loggers and to whoever asks the Trainer for them.

    `log_dict` does the same with an object for each metric, to be reduced over steps and ranks: 4 % of the quickstart's
    time for numbers that are means over both already.

    Args:
        trainer: the Lightning Trainer.
        row: the metrics, the same on all ranks.
    """
    values = {name: torch.tensor(value) for name, value in row.items()}
    for known in (trainer.callback_metrics, trainer.logged_metrics):
        for name in [name for name in known if name.startswith("time/") and name not in row]:
            del known[name]  # a phase that an earlier iteration had, such as a publish
        known.update(values)
    step = trainer.fit_loop.epoch_loop._batches_that_stepped  # the step under which Lightning logs the rest
    for logger in trainer.loggers:
        logger.log_metrics({**row, "epoch": trainer.current_epoch}, step=step)
        logger.save()


class PassAtK(Metric):
    """Probability that at least one of `k` samples is correct, mean over problems, or an end of its 95 % interval.

    Without bias from `n ≥ k` samples (`functional.evaluation.pass_at_k`). The interval is Wilson's for one sample per
    problem, and for several Wilson's with the effective size of samples that are clustered by problem.

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


class AverageAtK(PassAtK):
    """Mean share of correct samples (avg@k), over problems; it is pass@1 without bias.

    >>> metric = AverageAtK()
    >>> metric.update(torch.tensor([[True, False], [True, True]]))
    >>> metric.compute()
    tensor(0.7500)
    """

    def __init__(self, part: Literal["mean", "low", "high"] = "mean") -> None:
        super().__init__(1, part)


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
            self[STOPPED[kind]] = AverageAtK()

    def add(self, correct: Mapping[str, Tensor], stopped: Mapping[str, Tensor]) -> None:
        """Add problems by the kind of answers: "problems n", True where one is correct, and where it stopped."""
        for name, (kind, _) in self.accuracies.items():
            for suffix in BOUNDS:
                self[name + suffix].update(correct[kind])  # pyright: ignore[reportCallIssue]
        for kind, grid in stopped.items():
            self[STOPPED[kind]].update(grid)  # pyright: ignore[reportCallIssue]
