"""The record of the iteration under way: its rollout, its metrics (sums of scalars), its seconds."""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lit_qrl.functional._statistics import masked_sums
from lit_qrl.strategies.peers import gather_objects
from lit_qrl.types import AllReduce, MicroBatch, RolloutBatch, no_all_reduce


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
        one = torch.as_tensor(value)
        self.add(name, torch.stack([one.detach().float(), torch.ones_like(one, dtype=torch.float)]))

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


def log_row(trainer: Trainer, row: Mapping[str, float]) -> None:
    """Give an iteration's metrics to the loggers and to whoever asks the Trainer for them.

    `log_dict` does the same with an object for each metric, to be reduced over steps and ranks: 4 % of the quickstart's
    time for numbers that are means over both already.

    Args:
        trainer: of the run.
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


class IterationState:
    """What is known of the iteration under way; `close` turns it into one row of metrics.

    `time/iteration` is the wall time from the end of one iteration to the end of the next, what runs between them
    (checkpoint, evaluation) included; the phases and `time/other` add up to it.

    Attributes:
        metrics: sums of scalars; callbacks add theirs by `metrics.value` and `metrics.update`, what they observe of
            each of this rank's sequences by `metrics.values`, and counts by `metrics.total`.
        seconds: by phase, see `timed`.
        rollout: scored, from the end of its generation to the last update on it.
        problems: of the rollout, one for each of its groups.
        logprobs: of the last training forward, "b t" of its micro-batch, detached.
        drawing: seconds that the engine drew the rollout in, where that was before the iteration.
        hidden: seconds that rewards have worked while completions were still drawn; None where none could.
        skip_step: True when the mini-batch under way has nothing to learn from.
        row: the metrics of the iteration that was closed last, until they are logged.
    """

    def __init__(self) -> None:
        self.metrics = IterationMetrics()
        self.seconds: dict[str, float] = defaultdict(float)
        self.rollout: RolloutBatch | None = None
        self.problems: list[Any] = []
        self.logprobs: Tensor | None = None
        self.drawing: float | None = None
        self.hidden: float | None = None
        self.skip_step = False
        self.row: dict[str, float] = {}
        self._closed: float | None = None
        self._update_began: tuple[float, float] | None = None
        self._open, self._accounted = 0, 0.0
        self._old: tuple[Tensor, Tensor] | None = None

    def start(self) -> None:
        """Start the clock of the first iteration; each later one lasts from the end of the one before.

        A phase that comes before it, such as an evaluation, starts it too.
        """
        if self._closed is None:
            self._closed = time.perf_counter()

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the seconds of the enclosed work to `time/<phase>`; a phase inside another is a part of that one."""
        self.start()
        start = time.perf_counter()
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
            self._account(phase, time.perf_counter() - start)

    @contextmanager
    def timed_apart(self, phase: str, outer: str) -> Iterator[None]:
        """As `timed`, for a phase inside another that is no part of it."""
        before = self.seconds[phase]
        try:
            with self.timed(phase):
                yield
        finally:
            self.seconds[outer] -= self.seconds[phase] - before

    def _account(self, phase: str, seconds: float) -> None:
        self.seconds[phase] += seconds
        if not self._open:
            self._accounted += seconds

    def update_begins(self) -> None:
        """Start the clock of the updates at the first micro-batch; a second call changes nothing."""
        if self._update_began is None:
            self._update_began = time.perf_counter(), self._accounted

    def update_ends(self) -> None:
        """Add what passed since to `time/update`, less the phases in between: a device works while the host deals."""
        if self._update_began is not None:
            began, accounted = self._update_began
            self._account("update", time.perf_counter() - began - (self._accounted - accounted))
            self._update_began = None

    def remember_old(self, part: MicroBatch, logprobs: Tensor) -> None:
        """Take the training forward's log-probs as learner_old's, which they are until the first update."""
        rollout, mask = self.rollout, part.batch.mask
        if rollout is None or rollout.learner_old_logprobs is not None:
            return
        if self._old is None:
            self._old = (torch.zeros_like(rollout.sampler_logprobs), torch.zeros_like(rollout.mask))
        old, known = self._old
        old[part.rows, : mask.shape[1]] = torch.where(mask, logprobs.detach().float(), 0.0)
        known.index_fill_(0, part.rows, True)

    def measured(self) -> RolloutBatch | None:
        """Return the rollout with learner_old's log-probs, scored or remembered; what is not known of it is masked."""
        if self.rollout is None or self._old is None:
            return self.rollout
        old, known = self._old
        return replace(self.rollout, learner_old_logprobs=old, mask=self.rollout.mask & known)

    def close(self, all_reduce: AllReduce) -> None:
        """Make the row of the iteration after its last update: means over all ranks, and seconds."""
        rollout = self.rollout
        if rollout is None:
            return
        tokens = float(all_reduce(rollout.mask.sum()))  # waits for the device, so that the update is over
        self.update_ends()
        scored = ~rollout.rewards.isnan()
        of_scored = {
            "reward/mean": rollout.rewards,
            "rollout/length": torch.where(scored, rollout.completion_length.float(), torch.nan),
            **{f"reward/{name}": values for name, values in rollout.reward_parts.items()},
        }
        for name, values in of_scored.items():
            self.metrics.values(name, values)
        self.metrics.values("rollout/stopped", rollout.stopped.float())
        self.metrics.add("reward/std", deviation(rollout.rewards, all_reduce))
        drawing = self.seconds["generate"] if self.drawing is None else self.drawing
        self.metrics.value("rollout/tokens_per_second", tokens / max(drawing, 1e-9))
        if self.drawing is not None:
            self.metrics.value("rollout/seconds_ahead", self.drawing)
        if self.hidden is not None:
            self.metrics.value("rollout/reward_seconds_hidden", self.hidden)
        now, began = time.perf_counter(), self._closed
        self.seconds["iteration"] = now - (now if began is None else began)
        self.seconds["other"] = self.seconds["iteration"] - self._accounted
        self._closed, self._accounted = now, 0.0
        self.metrics.update({f"time/{phase}": seconds for phase, seconds in self.seconds.items()})
        self.seconds.clear()
        self.row = self.metrics.compute(all_reduce)
        self.rollout = self._old = self.drawing = self.hidden = None

    def take_row(self) -> dict[str, float]:
        """Return the closed iteration's metrics, once: the epoch end that a resumed run repeats has none."""
        row, self.row = self.row, {}
        return row


def deviation(values: Tensor, all_reduce: AllReduce = no_all_reduce) -> Tensor:
    """Return (sample standard deviation of the values that are not NaN, 1), over all ranks, or (0, 0) where all are.

    >>> deviation(torch.tensor([1.0, torch.nan, 3.0]))[0]
    tensor(1.4142)
    """
    given = ~values.isnan()
    count, total = masked_sums(given, values, all_reduce=all_reduce).unbind()
    _, squares = masked_sums(given, (values - total / count.clamp(min=1)).square(), all_reduce=all_reduce).unbind()
    return torch.stack([(squares / (count - 1).clamp(min=1)).sqrt(), (count > 0).to(values.dtype)])
