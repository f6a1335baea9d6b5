"""Rewards of one's own: plain functions, by the signature that TRL's users know."""

import asyncio
from fractions import Fraction

from lit_qrl.rewards.puzzles import CountdownReward


def closeness(completions, target, **columns) -> list[float | None]:
    """Return 1 for an expression of the target's value, less the farther it is off; None for what is no expression.

    `completions` has one text for each sample, and each column of the rows, such as `target`, one value.
    """
    values = [CountdownReward.parse(text, Fraction(wanted)) for text, wanted in zip(completions, target, strict=True)]
    return [
        None if value is None else float(1 / (1 + abs(value[0] - Fraction(wanted))))
        for value, wanted in zip(values, target, strict=True)
    ]


async def brevity(completions, **columns) -> list[float]:
    """Return what a service says of each completion; here it takes a while to count its characters."""
    await asyncio.sleep(0.001)
    return [1.0 - len(text) / 100 for text in completions]
