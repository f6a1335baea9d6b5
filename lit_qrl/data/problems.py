"""Rows as prompts of token ids, and the order in which training poses them."""

import logging
from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import gcd, lcm

import torch

from lit_qrl.data.task import Row, Task
from lit_qrl.errors import ConfigError
from lit_qrl.loop.contracts import Problem
from lit_qrl.policy import CausalPolicy
from lit_qrl.seeding import derive_seed

log = logging.getLogger(__name__)

MOST_SLOTS = 1000
"""Of a block in which every source has its share: weights are met to a thousandth."""


def admit(
    rows: Sequence[Row], task: Task, policy: CausalPolicy, what: str, limit: int, long_prompt: str
) -> list[Problem]:
    """Return the rows as problems, without those whose prompt is too long.

    Args:
        rows: of the task.
        task: puts them in words.
        policy: puts the words into tokens.
        what: names the rows in errors.
        limit: longest prompt, in tokens.
        long_prompt: `drop` leaves longer ones out and says how many; `error` stops.

    Raises:
        ConfigError: there are no rows, or prompts are too long.
    """
    if len(rows) == 0:
        remedy = "set data.task.split, which is null for a set that is only evaluated on" if what == "training" else ""
        raise ConfigError(f"The task has no {what} rows.", remedy=f"Check data.task{remedy and f', and {remedy}'}.")
    encoded = policy.encode_all([task.prompt(row) for row in rows], task.tools)
    problems = [Problem(row, ids, policy.decode(ids)) for row, ids in zip(rows, encoded, strict=True)]
    kept = [problem for problem in problems if len(problem.prompt_ids) <= limit]
    dropped = len(rows) - len(kept)
    if dropped and (long_prompt == "error" or not kept):
        raise ConfigError(
            f"{dropped} of {len(rows)} {what} prompts are too long.",
            expected=f"at most data.max_prompt_tokens = {limit} tokens",
            given=f"up to {max(len(problem.prompt_ids) for problem in problems)} tokens",
            remedy="Raise the limit" + (", or set data.long_prompt to drop." if kept else "."),
        )
    if dropped:
        log.info(f"Dropped {dropped} of {len(rows)} {what} prompts over {limit} tokens.")
    return kept


def shares(weights: Mapping[str, float]) -> dict[str, int]:
    """Return how many slots of a block each source has, exactly where a thousand slots allow it.

    >>> shares({"gsm8k": 0.75, "math": 0.25})
    {'gsm8k': 3, 'math': 1}
    """
    exact = {name: Fraction(weight).limit_denominator(MOST_SLOTS) for name, weight in weights.items()}
    common = lcm(*(share.denominator for share in exact.values()))
    slots = {name: int(share * common) for name, share in exact.items()}
    if sum(slots.values()) > MOST_SLOTS * gcd(*slots.values()):
        total = sum(weights.values())
        slots = {name: max(1, round(weight / total * MOST_SLOTS)) for name, weight in weights.items()}
    return {name: count // gcd(*slots.values()) for name, count in slots.items()}


class PromptOrder:
    """Says which problem stands at a position of the endless stream of training prompts.

    Every pass over a source has an order of its own. With weights the stream is cut into blocks in which each source
    has its share of the slots, so that the mixture holds at any moment. All follows from the position and the seed:
    ranks that take different positions share the stream, and a resumed run needs its position alone.

    Args:
        sources: of each problem, the source that it is from.
        weights: of the sources; empty poses all problems equally often.
        seed: of every order.
        in_order: pose the problems as they stand, each pass anew.

    Raises:
        ConfigError: a source has no problem.

    >>> order = PromptOrder(["a"] * 90 + ["b"] * 10, {"a": 1.0, "b": 1.0}, seed=0)
    >>> sum(order.index(position) >= 90 for position in range(100))
    50
    """

    def __init__(self, sources: Sequence[str], weights: Mapping[str, float], seed: int, in_order: bool = False) -> None:
        self.seed, self.in_order = seed, in_order
        names = list(weights) or [""]
        self._members = [[i for i, source in enumerate(sources) if not weights or source == name] for name in names]
        for name, members in zip(names, self._members, strict=True):
            if not members:
                raise ConfigError(
                    f"The source {name!r} of the mixture has no training problem left.",
                    expected="at least one that is short enough and not evaluated on",
                    given=0,
                    remedy="Raise data.max_prompt_tokens, or leave the source out.",
                )
        # The names that seed an order; without weights there is one, of all problems.
        self._names: list[tuple[str, ...]] = [(name,) if weights else () for name in names]
        counts = shares(weights) if weights else {"": 1}
        self._slots = torch.tensor([index for index, name in enumerate(names) for _ in range(counts[name])])
        self._counts = [counts[name] for name in names]
        self._orders: dict[tuple[str, ...], tuple[int, torch.Tensor]] = {}

    def index(self, position: int) -> int:
        """Return the index of the problem at a position."""
        block, slot = divmod(position, len(self._slots))
        source, before = 0, position
        if len(self._members) > 1:
            slots = self._slots[self._order(("mixture",), block, len(self._slots))]
            source = int(slots[slot])
            before = block * self._counts[source] + int((slots[:slot] == source).sum())
        members = self._members[source]
        lap, offset = divmod(before, len(members))
        return members[int(self._order(("order", *self._names[source]), lap, len(members))[offset])]

    def _order(self, name: tuple[str, ...], lap: int, size: int) -> torch.Tensor:
        if self.in_order:
            return torch.arange(size)
        if name not in self._orders or self._orders[name][0] != lap:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, *name, lap))
            self._orders[name] = (lap, torch.randperm(size, generator=generator))
        return self._orders[name][1]


def warn_of_fewer(key: str, wanted: int | None, there: int) -> None:
    """Say that there are fewer problems to evaluate on than a setting asks for.

    Args:
        key: of the setting.
        wanted: how many; None and 0 stand for all.
        there: how many there are.
    """
    if wanted and there < wanted:
        log.warning("%s asks for %d problems, and there are %d: these are evaluated on.", key, wanted, there)
