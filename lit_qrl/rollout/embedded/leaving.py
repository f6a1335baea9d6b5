"""Rows that have ended, on their way to whoever waits for them while others are still drawn."""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lit_qrl.rollout.embedded.decode import Drawn

Gone = Callable[[Sequence[int], Drawn], None]
"""Takes rows by their numbers, and what was drawn of them, on the host."""


class Leaving:
    """Copies ended rows to the host without waiting for the device, and gives them away when they have come.

    Args:
        drawn: of all rows, on the device; steps write to it.
        gone: takes the rows.
    """

    def __init__(self, drawn: Drawn, gone: Gone) -> None:
        self.drawn, self.gone = drawn, gone
        self._under_way: deque[tuple[list[int], Drawn, torch.cuda.Event | None]] = deque()

    def take(self, rows: Sequence[int], at: Tensor) -> None:
        """Ask for rows whose last token comes by a step that the device has been given already.

        Args:
            rows: their numbers.
            at: the same, on the device.
        """
        parts = self.drawn.tokens, self.drawn.logprobs, self.drawn.length, self.drawn.stopped
        tokens, logprobs, length, stopped = (part.index_select(0, at).to("cpu", non_blocking=True) for part in parts)
        done = None
        if at.is_cuda:
            done = torch.cuda.Event()
            done.record()
        self._under_way.append((list(rows), Drawn(tokens, logprobs, length, stopped), done))

    def hand(self) -> None:
        """Give away the rows that have come."""
        while self._under_way:
            rows, drawn, done = self._under_way[0]
            if done is not None and not done.query():
                return
            self._under_way.popleft()
            self.gone(rows, drawn)
