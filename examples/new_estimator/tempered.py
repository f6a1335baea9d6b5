"""An estimator of one's own: importance weights with a temperature."""

import torch

from lit_qrl.loop.hooks import RLCallback
from lit_qrl.types import Correction


class TemperedIS(RLCallback):
    """Weighs every token by e^(power · d), at most `upper`: between no correction (0) and truncated IS (1).

    Args:
        power: how much of the log-ratio counts, in [0, 1].
        upper: the largest weight.
    """

    carries_ratio = True  # refused beside AIS, TruncatedIS, MaskedIS and TBPO, which would square the ratio

    def __init__(self, power: float = 0.5, upper: float = 2.0) -> None:
        if not 0 <= power <= 1:
            raise ValueError(f"The power of TemperedIS is out of range. Expected: 0 to 1. Given: {power}. Correct it.")
        self.power, self.upper = power, upper

    def correct(self, trainer, module, context) -> Correction:
        """Return the weights of one mini-batch and how many of them were cut."""
        weights = torch.exp(self.power * context.log_ratio)
        cut = context.all_reduce(((weights > self.upper) & context.mask).sum())
        tokens = context.all_reduce(context.mask.sum())
        return Correction(weights.clamp(max=self.upper), metrics={"correction/tempered_cut": cut / tokens.clamp(min=1)})
