"""The veto of single catastrophic tokens as a callback."""

from typing import Any

from lightning.pytorch import Trainer

from lit_qrl.functional._checks import check_veto
from lit_qrl.loop.hooks import RLCallback
from lit_qrl.loop.weighting import rejected
from lit_qrl.types import Correction, LossContext


class TokenVeto(RLCallback):
    """Rejects sequences in which the learner gives any token less than a share of the sampler's probability.

    Args:
        threshold: the smallest ratio learner_old / sampler that is let pass.
        count_rejected: leave rejected sequences in the loss's denominator.
    """

    def __init__(self, threshold: float = 1e-4, count_rejected: bool = False) -> None:
        check_veto(threshold)
        self.threshold, self.count_rejected = threshold, count_rejected

    def correct(self, trainer: Trainer, module: Any, context: LossContext) -> Correction:
        return rejected("veto", "vetoed_sequences", self.count_rejected, context, threshold=self.threshold)
