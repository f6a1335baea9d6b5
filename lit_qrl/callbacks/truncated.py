"""Importance sampling as callbacks: truncated, and masked."""

import math
from typing import Any, Literal

from lightning.pytorch import Trainer

from lit_qrl.errors import ConfigError
from lit_qrl.functional._checks import check_band, check_choice
from lit_qrl.loop.hooks import RLCallback
from lit_qrl.loop.weighting import DEFAULT_UPPER, EXTREME, Level, weighted
from lit_qrl.types import Correction, LossContext


class TruncatedIS(RLCallback):
    """Multiplies by the ratio learner_old / sampler, cut at a bound (AIS eq. 8; survey, "TIS").

    Args:
        level: the ratio of each `token`, of the whole `sequence` (their product), or their `geometric` mean.
        upper: the largest weight; null takes 2 for tokens, 5 for sequences and 2 for the geometric mean; `auto`
            (sequences only) measures sqrt(2 (1 + χ²)) on each mini-batch; `.inf` does not truncate, and then rejects
            tokens with a weight above e^20 and counts them in `correction/extreme_tokens`.
        lower: the smallest weight; null takes 1/upper.
    """

    carries_ratio = True

    def __init__(
        self,
        level: Level = "token",
        upper: float | Literal["auto"] | None = None,
        lower: float | None = 0.0,
    ) -> None:
        check_choice("level of TruncatedIS", level, "token", "sequence", "geometric")
        if upper == "auto" and level != "sequence":
            raise ConfigError(
                "TruncatedIS measures its bound for sequence ratios alone.",
                expected="level: sequence with upper: auto",
                given=f"level: {level}",
                remedy="Set level to sequence, or give a number.",
            )
        if upper == "auto":
            check_band(lower, math.inf, what="The band of TruncatedIS")
        elif isinstance(upper, str):
            raise ConfigError(
                "upper of TruncatedIS is unknown.", expected="a number or auto", given=upper, remedy="Correct it."
            )
        else:
            upper = DEFAULT_UPPER[level] if upper is None else upper
            check_band(lower, upper, what="The band of TruncatedIS")
        self.level: Level = level
        self.takes_sequence_ratio = level != "token"
        self.upper: float | Literal["auto"] = upper
        self.lower = lower
        self.needs = "sequence" if upper != "auto" and upper <= EXTREME else "batch"

    def correct(self, trainer: Trainer, module: Any, context: LossContext) -> Correction:
        return weighted("truncated", self.level, self.lower, self.upper, context)


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
