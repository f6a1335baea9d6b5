"""Geometric rejection as a callback."""

from typing import Any

from lightning.pytorch import Trainer

from lit_qrl.functional._checks import check_band
from lit_qrl.loop.hooks import RLCallback
from lit_qrl.loop.weighting import rejected
from lit_qrl.types import Correction, LossContext


class GeometricRejection(RLCallback):
    """Rejects sequences whose ratio per token, e^(mean d), leaves a band (survey, "Geo-RS"): no bias of length.

    It weighs nothing, so it combines with a truncated or adaptive correction.

    Args:
        lower: of the band, on the ratio itself; null takes 1/upper.
        upper: of the band.
        count_rejected: leave rejected sequences in the loss's denominator, as the survey's estimator does.
    """

    def __init__(self, lower: float | None = 0.99, upper: float = 1.01, count_rejected: bool = False) -> None:
        check_band(lower, upper, what="The band of GeometricRejection")
        self.lower, self.upper, self.count_rejected = lower, upper, count_rejected

    def correct(self, trainer: Trainer, module: Any, context: LossContext) -> Correction:
        return rejected("geometric_rejected", self.count_rejected, context, lower=self.lower, upper=self.upper)
