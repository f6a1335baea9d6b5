"""What the loop asks of the module that learns and of its data, and the plain way of what each run may do otherwise.

Rollouts are drawn in turns with the updates (`Schedule`), and every mini-batch is cut into the same number of
micro-batches (`MicroBatches`). `loop.schedule.RolloutPrefetcher` draws ahead instead, `loop.budget.TokenBudget` cuts by
tokens; the loop asks all of them alike.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lit_qrl.loop.batching import deal_by_length
from lit_qrl.loop.state import IterationState
from lit_qrl.objective import Objective
from lit_qrl.policy import CausalPolicy
from lit_qrl.rewards.base import Sample
from lit_qrl.rewards.streaming import StreamingRewards
from lit_qrl.rollout.engine import EngineDiedError, InFlight, RolloutEngine
from lit_qrl.types import AllReduce, Completion, RolloutBatch, SamplingParams


class Problem:
    """A row of the task with its prompt; a plain class, so that no data loader takes it apart or copies it."""

    def __init__(self, row: Mapping[str, Any], prompt_ids: list[int], prompt_text: str) -> None:
        self.row, self.prompt_ids, self.prompt_text = row, prompt_ids, prompt_text


@dataclass
class PendingRollout:
    """A rollout on its way.

    Args:
        iteration: that learns from it.
        weights: the iteration whose weights draw it.
        start: position of its first prompt.
        problems: of this process.
        completions: None until they are drawn.
        seconds: that the engine took.
    """

    iteration: int
    weights: int
    start: int
    problems: Sequence[Problem]
    completions: list[Completion] | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """The groups of an iteration as a table: a slot each, one row for each mini-batch, `rank` owns some columns.

    A pass moves groups between mini-batches within their column alone. So every mini-batch holds equally many groups of
    every rank, the same ones for any number of ranks, and no group ever leaves the rank that drew it.

    Args:
        groups: of all ranks together, numbered row by row.
        mini_batches: rows.
        rank: of this process.
        world_size: number of processes; it divides the columns.

    >>> [Slots(groups=8, mini_batches=2, rank=rank, world_size=2).own for rank in range(2)]
    [[0, 1, 4, 5], [2, 3, 6, 7]]
    """

    groups: int
    mini_batches: int
    rank: int = 0
    world_size: int = 1

    @property
    def width(self) -> int:
        """Groups of a mini-batch, over all ranks."""
        return self.groups // self.mini_batches

    @property
    def columns(self) -> range:
        """Columns of this rank."""
        share = self.width // self.world_size
        return range(self.rank * share, (self.rank + 1) * share)

    @property
    def own(self) -> list[int]:
        """Slots of this rank, ascending: this is the order of its rollout."""
        return [row * self.width + column for row in range(self.mini_batches) for column in self.columns]

    def mini_batches_of_pass(self, generator: torch.Generator) -> Iterator[list[int]]:
        """Yield which groups of this rank's rollout each mini-batch of a pass holds.

        Args:
            generator: at the same state on all ranks; a pass moves it on by as much on each.
        """
        rows = torch.rand(self.width, self.mini_batches, generator=generator).argsort(dim=1)
        own = rows[self.columns.start : self.columns.stop]
        for step in range(self.mini_batches):
            yield [int(row) * len(own) + column for column, row in enumerate(own[:, step])]

    def lacking(self, filled: list[int], all_reduce: AllReduce, device: torch.device) -> list[int]:
        """Return the slots of all ranks that no group fills yet, ascending, the same list on every rank.

        Args:
            filled: those of this rank that a group fills.
            all_reduce: over the ranks.
            device: for what is exchanged.
        """
        counts = torch.zeros(self.groups, dtype=torch.long, device=device)
        counts[filled] = 1
        return (all_reduce(counts) == 0).nonzero().flatten().tolist()


class Schedule:
    """Which weights draw which rollout, and when: here the newest, in turns with the updates."""

    in_flight = False
    """True where weights come while completions are drawn."""
    drawing = False
    """True while the engine draws, or has more to draw."""
    failed = False
    """True where the engine has died of what is under way."""

    def __init__(self) -> None:
        self._unfinished: int | None = None

    def due(self, iteration: int, iterations: int | None = None) -> bool:
        """Return whether new weights are published before an iteration: where something is to be drawn with them.

        Args:
            iteration: that begins.
            iterations: of the run; None or a negative number has no end.
        """
        return True

    def published(self, version: int, iteration: int) -> None:
        """Note whose weights a version has."""

    def rollout_begins(self, position: int) -> None:
        """Keep the position of before: a rollout of which nothing was learned is drawn anew by whoever resumes."""
        self._unfinished = position

    def take(self, learner: "Learner", count: int, numbers: Sequence[int]) -> PendingRollout:
        """Return problems of the iteration under way, and their completions where they were drawn already.

        Args:
            learner: whose iteration it is.
            count: problems of all ranks.
            numbers: of those the ones of this rank, from 0.
        """
        now, start = learner.trainer.current_epoch, learner.data.position
        return PendingRollout(now, now, start, learner.data.next_problems(count, numbers))

    def update_begins(self, iteration: int) -> None:
        """Note that the rollout of an iteration is behind the weights from now on."""
        self._unfinished = None

    def measured(self, learner: "Learner") -> None:
        """Log what was measured of the iteration's schedule while the learner updated."""

    def settle(self, learner: "Learner") -> EngineDiedError | None:
        """Wait until nothing is drawn; return the engine's death, after which what it lacked is not begun."""
        return None

    def state(self, position: int, alone: bool) -> dict[str, Any]:
        """Return what continues the run of now: the position in the stream of prompts, and rollouts drawn ahead.

        Args:
            position: of the next prompt that nobody has taken.
            alone: whether this is the only process.
        """
        return {"position": position if self._unfinished is None else self._unfinished}

    def load(self, state: Mapping[str, Any], alone: bool) -> int:
        """Continue from a state; return the position in the stream of prompts.

        Args:
            state: of a run of any schedule; what it drew ahead is drawn anew by one that draws in turns.
            alone: whether this is the only process.
        """
        begun = state.get("ahead", {}).get("drafts")
        return begun[0]["start"] if begun else state["position"]

    def close(self) -> None:
        """Begin nothing more, once there is what a checkpoint waits for."""


class MicroBatches:
    """Cuts every mini-batch into the same number of micro-batches, its rows dealt by length.

    Args:
        parts: the number.
    """

    def __init__(self, parts: int) -> None:
        self.parts = parts

    @property
    def whole(self) -> bool:
        """True where a forward pass always sees all of a mini-batch."""
        return self.parts == 1

    def most(self, rows: int) -> int:
        """Return how many micro-batches a mini-batch of so many rows may have, before anything is drawn."""
        return self.parts

    def begin(self, learner: "Learner", steps: Sequence[tuple[RolloutBatch, Tensor]]) -> None:
        """Look at an iteration's steps before the first: a rollout, and which of its rows the mini-batch has."""

    def deal(self, learner: "Learner", batch: RolloutBatch) -> list[list[int]]:
        """Return the rows of a mini-batch's micro-batches."""
        return deal_by_length(batch.total_length.tolist(), self.parts)

    def scoring_passes(self, learner: "Learner", rollout: RolloutBatch) -> int:
        """Return in how many forward passes a whole rollout of this process is scored."""
        return learner.data.mini_batches * self.parts

    def pass_begins(self, learner: "Learner", batch: RolloutBatch, number: int) -> None:
        """Called before each forward and backward pass of an iteration, with its number."""

    def pass_ends(self, learner: "Learner") -> None:
        """Called after each."""

    def end(self, learner: "Learner") -> None:
        """Called after the last."""

    def state(self) -> dict[str, Any]:
        """Return what a resumed run must cut by."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Cut by what a run before was cut by."""


class RolloutData(Protocol):
    """What the loop asks of the data module: problems, the engine that answers them, their rewards, and sizes."""

    engine: RolloutEngine
    schedule: Schedule
    budget: MicroBatches
    group_size: int
    passes: int
    mini_batches: int
    in_flight_updates: InFlight
    max_prompt_tokens: int
    max_completion_tokens: int
    temperature: float
    base_seed: int
    position: int
    """In the stream of prompts."""

    @property
    def task(self) -> object:
        """Whose problems are posed."""
        ...

    @property
    def sampling(self) -> SamplingParams:
        """How rollouts are drawn."""
        ...

    @property
    def slots(self) -> Slots:
        """Which groups of an iteration this process draws and learns from."""
        ...

    @property
    def longest_evaluation(self) -> int | None:
        """Tokens of the longest prompt and completion of an evaluation, where rollouts have none as long."""
        ...

    @property
    def evaluation_limits(self) -> tuple[int, ...]:
        """Longest answers of the sets to evaluate on, in tokens."""
        ...

    def next_problems(self, count: int, numbers: Sequence[int] | None = None) -> list[Problem]:
        """Return this process's share of the next `count` problems, which it moves the position on by."""
        ...

    def problems_at(self, start: int, numbers: Sequence[int]) -> list[Problem]:
        """Return problems of the stream, counted from a position."""
        ...

    def judging(self, problems: Sequence[Problem], streams: bool) -> StreamingRewards:
        """Return the rewards of a rollout, at work already while it is drawn where `streams`."""
        ...

    def reward(self, samples: Sequence[Sample], group_size: int, *, begun: Any) -> Any:
        """Return total rewards, the parts by name and the number of failures, of rewards that have begun with them."""
        ...

    def solved(self, parts: Mapping[str, Tensor]) -> Tensor | None:
        """Return which completions of a rollout are correct, by the parts of their rewards; None where none say it."""
        ...


class Learner(Protocol):
    """What the loop and its callbacks may ask of the module that is trained."""

    policy: CausalPolicy
    objective: Objective
    iteration: IterationState

    @property
    def trainer(self) -> Trainer:
        """Lightning's."""
        ...

    @property
    def data(self) -> RolloutData:
        """The data module, with the engine."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the learner's weights are."""
        ...

    @property
    def global_rank(self) -> int:
        """The number of this process."""
        ...

    @property
    def reduce(self) -> AllReduce:
        """How a tensor is reduced over all ranks."""
        ...

    def score(self, rollout: RolloutBatch, chunks: int = 1, routes: Tensor | None = None) -> Tensor:
        """Return the learner's log-probs "b t" of a rollout's completions, in the learner's own arithmetic.

        Args:
            rollout: the sequences.
            chunks: forward passes.
            routes: "b s layers k", into which the experts that its own routers choose are written.
        """
        ...


def widest(width: int, all_reduce: AllReduce, device: torch.device) -> int:
    """Return the largest `width` of any rank."""
    return int(all_reduce(torch.tensor(width, device=device), op="max"))
