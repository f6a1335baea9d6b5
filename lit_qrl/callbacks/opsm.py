"""The off-policy sequence mask as a callback."""

from typing import Any

from lightning.pytorch import Trainer

from lit_qrl.functional._checks import check_delta
from lit_qrl.loop.hooks import RLCallback
from lit_qrl.loop.weighting import rejected
from lit_qrl.types import Correction, LossContext


class OffPolicySequenceMask(RLCallback):
    """Rejects negative sequences that the learner finds much less likely than the sampler did.

    Args:
        delta: the mean of sampler − learner_old, in nats per token, that a sequence with a negative advantage may
            have. There is no default: it must lie above the format's own mismatch (`mismatch/kl_k1`).
        count_rejected: leave rejected sequences in the loss's denominator.
    """

    takes_sequence_ratio = True

    def __init__(self, delta: float, count_rejected: bool = False) -> None:
        check_delta(delta)
        self.delta, self.count_rejected = delta, count_rejected

    def correct(self, trainer: Trainer, module: Any, context: LossContext) -> Correction:
        return rejected("off_policy", "off_policy_sequences", self.count_rejected, context, delta=self.delta)
