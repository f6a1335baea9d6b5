"""Masked importance sampling as a callback."""

from typing import Any

from lightning.pytorch import Trainer

from lit_qrl.functional._checks import check_band, check_choice
from lit_qrl.loop.hooks import RLCallback
from lit_qrl.loop.weighting import DEFAULT_UPPER, EXTREME, Level, weighted
from lit_qrl.types import Correction, LossContext


class MaskedIS(RLCallback):
    """Multiplies by the ratio learner_old / sampler inside a band, by 0 outside (survey, "MIS"; IcePop for tokens).

    What is masked stays in the loss's denominator.

    Args:
        level: the ratio of each `token`, of the whole `sequence` (their product), or their `geometric` mean.
        lower: of the band; null takes 1/upper; the survey's one-sided form has 0.
        upper: of the band; null takes 2 for tokens, 5 for sequences and 2 for the geometric mean.
    """

    carries_ratio = True

    def __init__(self, level: Level = "token", lower: float | None = None, upper: float | None = None) -> None:
        check_choice("level of MaskedIS", level, "token", "sequence", "geometric")
        upper = DEFAULT_UPPER[level] if upper is None else upper
        self.level: Level = level
        self.takes_sequence_ratio = level != "token"
        check_band(lower, upper, what="The band of MaskedIS")
        self.lower, self.upper = lower, upper
        self.needs = "sequence" if upper <= EXTREME else "batch"

    def correct(self, trainer: Trainer, module: Any, context: LossContext) -> Correction:
        return weighted("masked", self.level, self.lower, self.upper, context)
