"""Which groups of an iteration each process draws and learns from, so that the number of processes changes nothing."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_qrl.types import AllReduce


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


def lacking(slots: Slots, filled: list[int], all_reduce: AllReduce, device: torch.device) -> list[int]:
    """Return the slots of all ranks that no group fills yet, ascending, the same list on every rank.

    Args:
        slots: of this rank.
        filled: those of its own that a group fills.
        all_reduce: over the ranks.
        device: for what is exchanged.
    """
    counts = torch.zeros(slots.groups, dtype=torch.long, device=device)
    counts[filled] = 1
    return (all_reduce(counts) == 0).nonzero().flatten().tolist()


def widest(width: int, all_reduce: AllReduce, device: torch.device) -> int:
    """Return the largest `width` of any rank."""
    value: Tensor = all_reduce(torch.tensor(width, device=device), op="max")
    return int(value)
