"""A batch that memory does not do for is halved until it fits."""

import logging
import traceback
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from lit_qrl.errors import asked, out_of_memory
from lit_qrl.rollout.embedded.decode import Piece, split
from lit_qrl.rollout.engine import EngineDiedError

log = logging.getLogger(__name__)
Result = TypeVar("Result")

UNLIMITED = 2**62
"""Tokens that fit as long as memory has not run out."""


class Shortage:
    """Remembers how much fitted into memory, from an engine's start to its end."""

    def __init__(self) -> None:
        self.fitting = UNLIMITED

    def halving(
        self, batch: list[Piece], longest: int, draw: Callable[[list[Piece]], Result]
    ) -> Iterator[tuple[list[Piece], Result]]:
        """Yield what is drawn for a batch, in halves where memory runs out; later batches are not larger than those.

        Args:
            batch: of sequences.
            longest: of them, prompt and completion, in tokens.
            draw: the completions of a part of it, which depend on the part by rounding alone.

        Raises:
            EngineDiedError: when memory does not do for one sequence.
        """
        waiting = split(batch, max(1, self.fitting // longest))
        while waiting:
            pieces = waiting.pop(0)
            drawn = None
            try:
                drawn = draw(pieces)
            except (RuntimeError, MemoryError) as error:
                half = freed(error, sum(piece.count for piece in pieces), "decoded")
                self.fitting = half * longest
                waiting = [*split(pieces, half), *waiting]
            if drawn is not None:
                yield pieces, drawn


def freed(error: Exception, rows: int, done: str) -> int:
    """Return half of the rows that memory did not do for, after what they took is given back.

    Args:
        error: what was raised; any other than that memory ran out is raised again.
        rows: sequences of the batch.
        done: what was done to them, as a participle.

    Raises:
        EngineDiedError: when it was one sequence.
    """
    if not out_of_memory(error):
        raise error
    said, half = asked(error), rows // 2
    if not half:
        raise EngineDiedError(
            f"Memory ran out while one sequence was {done}: {said}. Lower data.max_completion_tokens or "
            "data.max_prompt_tokens, or leave the sampler more of the device's memory."
        ) from error
    traceback.clear_frames(error.__traceback__)  # they hold the batch's tensors
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    log.warning(
        "Memory ran out while %d sequences were %s (%s): going on with %d at a time. Lower data.engine.max_batch or "
        "data.engine.cache_gigabytes to begin with fewer.",
        rows,
        done,
        said,
        half,
    )
    return half
