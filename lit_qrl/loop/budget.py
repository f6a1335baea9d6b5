"""Micro-batches by tokens, where `data.micro_batches` is auto: how many tokens fit, and how an iteration is cut."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_qrl.loop.batching import deal_by_length, deal_by_tokens, padded_parts, token_parts
from lit_qrl.loop.contracts import Learner, MicroBatches, widest
from lit_qrl.network.memory import RESERVE, free_memory
from lit_qrl.network.padding_free import is_padding_free
from lit_qrl.network.shards import own
from lit_qrl.types import RolloutBatch

log = logging.getLogger(__name__)

PLAIN = 2**13
"""Tokens of a micro-batch where nothing is measured: matrix products of so many rows keep a GPU busy."""
LARGEST = 2**15
"""Tokens beyond which a pass gains nothing: launches and small kernels are a few hundredths of it."""


def tokens_that_fit(tokens: int, peak: int, free: int, total: int) -> int:
    r"""Return how many tokens a pass may hold, from what one of $n$ tokens took.

    $T = 2^{\lfloor \log_2 (n (F - 0.05\,M) / P) \rfloor}$, in 2¹³ … 2¹⁵: a power of two, so that a few bytes more or
    less in another process change nothing.

    Args:
        tokens: $n$ of the pass that was measured.
        peak: $P$, bytes that were allocated during it at most, beyond those before it.
        free: $F$, bytes that can be allocated.
        total: $M$, bytes of the device.

    >>> tokens_that_fit(8192, peak=20 << 30, free=60 << 30, total=140 << 30)
    16384
    """
    room = max(tokens * (free - RESERVE * total) / max(peak, 1), 1.0)
    return min(max(2 ** math.floor(math.log2(room)), PLAIN), LARGEST)


class TokenBudget(MicroBatches):
    """How many tokens a micro-batch holds at most, and how many micro-batches an optimizer step of this iteration has.

    Where the number is not given, it is 8192 in the first iteration; on a GPU that measures what its passes take, and
    chooses at its end, once for the run: it is kept in checkpoints, so that a resumed run cuts alike. Under
    `trainer.deterministic` and on a CPU it stays 8192, since free memory follows from nothing that a run is told.

    Args:
        limit: tokens; None lets memory say.
    """

    def __init__(self, limit: int | None) -> None:
        super().__init__(parts=1)
        self.limit = self.chosen = limit
        self._before: tuple[int, int] | None = None
        self._measured: tuple[int, int] | None = None

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch at most; one longer sequence is a micro-batch alone."""
        return self.chosen or PLAIN

    @property
    def whole(self) -> bool:
        """False: a rollout may need more."""
        return False

    def most(self, rows: int) -> int:
        """Return as many as there are sequences, each of which is one at the least; `begin` says how many it is."""
        return rows

    def measures(self, device: torch.device) -> bool:
        """Return whether memory is to be looked at."""
        return self.chosen is None and device.type == "cuda" and not torch.are_deterministic_algorithms_enabled()

    def pass_begins(self, learner: Learner, batch: RolloutBatch, number: int) -> None:
        """Say which micro-batch is the last, and remember what is allocated before its forward and backward pass.

        The pass then keeps no more than it needs.
        """
        trainer = learner.trainer
        trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = number + 1 == trainer.num_training_batches
        measures = self.measures(learner.device)
        learner.policy.holds_logits = not measures
        if measures:
            torch.cuda.reset_peak_memory_stats(learner.device)
            tokens = _Sizes.of(batch).computed() if _flat(learner) else batch.tokens.numel()
            self._before = tokens, torch.cuda.memory_allocated(learner.device)

    def pass_ends(self, learner: Learner) -> None:
        """Take what the pass took; the last one counts, before which gradients were there."""
        if self._before is not None:
            tokens, before = self._before
            self._measured = tokens, torch.cuda.max_memory_allocated(learner.device) - before
            self._before = None

    def begin(self, learner: Learner, steps: Sequence[tuple[RolloutBatch, Tensor]]) -> None:
        """Choose the number of micro-batches of this iteration's steps, and tell Lightning's loop.

        It is the most that any mini-batch of any process needs, since all take their steps together.

        Args:
            learner: that is updated.
            steps: of this iteration: a rollout, and which of its rows the mini-batch has.
        """
        known = {id(rollout): _Sizes.of(rollout) for rollout, _ in steps}
        flat = _flat(learner)
        most = max(len(known[id(rollout)].rows(rows.tolist()).cut(self.tokens, flat)) for rollout, rows in steps)
        self.parts = widest(most, learner.reduce, learner.device)
        learner.iteration.metrics.value("update/micro_batches", float(self.parts))
        # Until now Lightning's loop, which is in its first batch, takes each sequence for a micro-batch of its own, as
        # the length of the data set says before anything is drawn.
        trainer, batches = learner.trainer, len(steps) * self.parts
        trainer.accumulate_grad_batches, trainer.fit_loop.max_batches = self.parts, batches
        interval, due = trainer.val_check_interval, trainer.val_check_batch
        if isinstance(interval, float) and due is not None and math.isfinite(due):
            trainer.val_check_batch = max(int(batches * interval), 1)

    def end(self, learner: Learner) -> None:
        """Choose at the end of the first iteration: optimizer states are there, and its checkpoint is to come."""
        if self._measured is None or not self.measures(learner.device):
            return
        tokens, peak = self._measured
        parameters = [parameter for parameter in learner.policy.parameters() if parameter.requires_grad]
        free = free_memory(learner.device) - sum(own(one).nbytes for one in parameters if one.grad is None)
        total = torch.cuda.get_device_properties(learner.device).total_memory
        fits = tokens_that_fit(tokens, peak, free, total)
        self.chosen = -widest(-fits, learner.reduce, learner.device)  # the least of any process
        log.debug(
            "data.micro_batches: auto takes %d tokens a micro-batch from now on; a pass of %d took %.1f GiB of %.1f.",
            self.chosen,
            tokens,
            peak / 2**30,
            free / 2**30,
        )

    def deal(self, learner: Learner, batch: RolloutBatch) -> list[list[int]]:
        """Return the rows of a mini-batch's micro-batches, as many as `parts`."""
        sizes = _Sizes.of(batch)
        return deal_by_tokens(*sizes, self.parts) if _flat(learner) else deal_by_length(sizes.lengths, self.parts)

    def scoring_passes(self, learner: Learner, rollout: RolloutBatch) -> int:
        """Return in how many forward passes a rollout is scored: the most that any process needs.

        A learner in parts gathers its layers in each pass, which all processes do together.
        """
        return widest(len(_Sizes.of(rollout).cut(self.tokens, _flat(learner))), learner.reduce, learner.device)

    def state(self) -> dict[str, Any]:
        """Return the tokens of a micro-batch, once they are chosen."""
        return {} if self.chosen is None else {"micro_batch_tokens": self.chosen}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take the tokens that a run before chose, where this one is not given them."""
        if self.limit is None:
            self.chosen = state.get("micro_batch_tokens")


class _Sizes(NamedTuple):
    """Completion tokens, prompt tokens and group of each row."""

    completions: list[int]
    prompts: list[int]
    groups: list[int]

    @classmethod
    def of(cls, batch: RolloutBatch) -> "_Sizes":
        prompts = batch.prompt_length
        return cls((batch.total_length - prompts).tolist(), prompts.tolist(), batch.group.tolist())

    @property
    def lengths(self) -> list[int]:
        return [prompt + completion for prompt, completion in zip(self.prompts, self.completions, strict=True)]

    def rows(self, chosen: Sequence[int]) -> "_Sizes":
        return _Sizes(*([values[row] for row in chosen] for values in self))

    def computed(self) -> int:
        """Tokens where a group's prompt is computed once."""
        return sum(self.completions) + sum(dict(zip(self.groups, self.prompts, strict=True)).values())

    def cut(self, tokens: int, flat: bool) -> list[list[int]]:
        return token_parts(*self, tokens) if flat else padded_parts(self.lengths, tokens)


def _flat(learner: Learner) -> bool:
    """Return whether the learner computes real tokens alone, a group's prompt once."""
    return is_padding_free(learner.policy.network)
