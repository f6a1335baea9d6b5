"""The record of the iteration under way: its rollout, its metrics, its seconds."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lit_qrl.loop.metrics import IterationMetrics
from lit_qrl.types import AllReduce, MicroBatch, RolloutBatch


class IterationState:
    """What is known of the iteration under way; `close` turns it into one row of metrics.

    Attributes:
        metrics: sums of scalars; callbacks add theirs by `metrics.value` and `metrics.update`.
        seconds: by phase, see `timed`.
        rollout: scored, from the end of its generation to the last update on it.
        logprobs: of the last training forward, "b t" of its micro-batch, detached.
        skip_step: True when the mini-batch under way has nothing to learn from.
        row: the metrics of the iteration that was closed last, until they are logged.
    """

    def __init__(self) -> None:
        self.metrics = IterationMetrics()
        self.seconds: dict[str, float] = defaultdict(float)
        self.rollout: RolloutBatch | None = None
        self.logprobs: Tensor | None = None
        self.skip_step = False
        self.row: dict[str, float] = {}
        self._started = 0.0

    def start(self) -> None:
        """Start the clock."""
        self._started = time.perf_counter()

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the seconds of the enclosed work to `time/<phase>`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start

    def remember_old(self, part: MicroBatch, logprobs: Tensor) -> None:
        """Take the training forward's log-probs as learner_old's: with one update per rollout they are the same."""
        rollout, mask = self.rollout, part.batch.mask
        if rollout is None or part.batch.learner_old_logprobs is not None:
            return
        if rollout.learner_old_logprobs is None:
            rollout.learner_old_logprobs = torch.zeros_like(rollout.sampler_logprobs)
        rollout.learner_old_logprobs[part.rows, : mask.shape[1]] = torch.where(mask, logprobs.detach().float(), 0.0)

    def close(self, all_reduce: AllReduce) -> None:
        """Make the row of the iteration after its last update: means over all ranks, and seconds."""
        rollout = self.rollout
        if rollout is None:
            return
        tokens = float(rollout.mask.sum())
        self.metrics.update({"reward/mean": rollout.rewards.mean(), "reward/std": rollout.rewards.std()})
        self.metrics.update({f"reward/{name}": values.mean() for name, values in rollout.reward_parts.items()})
        self.metrics.update(
            {
                "rollout/length": rollout.completion_length.float().mean(),
                "rollout/stopped": rollout.stopped.float().mean(),
                "rollout/tokens_per_second": tokens / max(self.seconds["generate"], 1e-9),
            }
        )
        total = time.perf_counter() - self._started
        self.seconds["update"] = max(total - self.seconds["rollout"] - self.seconds["score"], 0.0)
        self.seconds["iteration"] = total + self.seconds["publish"]
        self.metrics.update({f"time/{phase}": seconds for phase, seconds in self.seconds.items()})
        self.seconds.clear()
        self.row = self.metrics.compute(all_reduce)
        self.rollout = None

    def take_row(self) -> dict[str, float]:
        """Return the closed iteration's metrics, once: the epoch end that a resumed run repeats has none."""
        row, self.row = self.row, {}
        return row
