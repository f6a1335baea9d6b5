"""New weights between two steps of the embedded engine, while completions are under way."""

import torch

from lit_qrl.network.autocast import without_autocast
from lit_qrl.rollout.engine import RolloutEngine


class Flight:
    """Lets weights in between two steps, and says which version draws what comes next.

    Args:
        engine: whose `between_steps` may publish.
        recompute: keys and values of what was drawn are computed again with the new weights, instead of kept.
    """

    def __init__(self, engine: RolloutEngine, recompute: bool) -> None:
        self.engine, self.recompute = engine, recompute

    @property
    def version(self) -> int:
        """Of the weights that draw the next token."""
        return self.engine.version

    def changed(self) -> bool:
        """Let weights in, and return whether there were any."""
        before = self.engine.version
        if self.engine.between_steps is not None:
            # weights are noted by their versions, which tensors of inference mode lack, and sent as they are
            with torch.inference_mode(False), without_autocast():
                self.engine.between_steps()
        return self.engine.version != before


def flight_of(engine: RolloutEngine, in_flight: str) -> Flight | None:
    """Return what lets weights in, or None where they come between two calls alone.

    Args:
        engine: that draws.
        in_flight: of its spec.
    """
    return None if in_flight == "none" else Flight(engine, in_flight == "recompute")
