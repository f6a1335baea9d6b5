"""Importance sampling as callbacks: truncated, and masked."""

import math
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lit_qrl.errors import ConfigError, check_choice
from lit_qrl.functional._checks import check_band
from lit_qrl.functional._statistics import share
from lit_qrl.functional.importance import Level, adaptive_upper, masked_weights, truncated_weights
from lit_qrl.loop.hooks import RLCallback
from lit_qrl.types import Correction, LossContext

# The peers' usual bounds: 2 for a token, 5 for a sequence; 2 for the geometric mean is QaRL's cap (its Table 2).
DEFAULT_UPPER: dict[Level, float] = {"token": 2.0, "sequence": 5.0, "geometric": 2.0}
# A weight of e^20 outweighs any batch. Only without an upper bound can it occur; then its tokens leave the loss and
# are counted, rather than that it is clamped in silence.
EXTREME = math.exp(20.0)


class _Weights(RLCallback):
    """Multiplies by the ratio of one level, changed outside of a band; an upper edge of `auto` is measured."""

    carries_ratio = True
    kind: ClassVar[Literal["truncated", "masked"]]

    def __init__(self, level: Level, lower: float | None, upper: float | Literal["auto"] | None) -> None:
        name = type(self).__name__
        check_choice(f"level of {name}", level, ("token", "sequence", "geometric"))
        if isinstance(upper, str) and (upper != "auto" or self.kind == "masked"):
            number = "a number or auto" if self.kind == "truncated" else "a number"
            raise ConfigError(f"upper of {name} is unknown.", expected=number, given=upper, remedy="Correct it.")
        upper = DEFAULT_UPPER[level] if upper is None else upper
        check_band(lower, math.inf if upper == "auto" else upper, what=f"The band of {name}")
        self.level: Level = level
        self.lower = lower
        self.upper: float | Literal["auto"] = upper
        self.takes_sequence_ratio = level != "token"
        self.needs = "sequence" if upper != "auto" and upper <= EXTREME else "batch"

    def correct(self, trainer: Trainer, module: Any, context: LossContext) -> Correction:
        d, mask, all_reduce = context.log_ratio, context.mask, context.all_reduce
        weigh = partial(truncated_weights if self.kind == "truncated" else masked_weights, level=self.level)
        bound = adaptive_upper(d, mask, all_reduce) if self.upper == "auto" else self.upper
        weights, keep = weigh(d, mask, lower=self.lower, upper=bound), None
        changed = weights == 0 if self.kind == "masked" else weights != weigh(d, mask, lower=0.0, upper=math.inf)
        units = mask
        if self.level != "token":
            units, changed = mask.any(dim=1), (changed & mask).any(dim=1)
        unit = "tokens" if self.level == "token" else "sequences"
        metrics = {f"correction/{self.kind}_{unit}": share(units, changed, all_reduce)}
        if isinstance(bound, Tensor):
            metrics["correction/upper"] = bound
        elif bound > EXTREME:
            keep = (weights <= EXTREME) | ~mask
            metrics["correction/extreme_tokens"] = all_reduce((~keep).sum())
            weights = torch.where(keep, weights, 1.0)
        return Correction(weights=weights, keep=keep, metrics=metrics)


class TruncatedIS(_Weights):
    """Multiplies by the ratio learner_old / sampler, cut at a bound (AIS eq. 8; survey, "TIS").

    Args:
        level: the ratio of each `token`, of the whole `sequence` (their product), or their `geometric` mean.
        upper: the largest weight; null takes 2 for tokens, 5 for sequences and 2 for the geometric mean; `auto`
            (sequences only) measures sqrt(2 (1 + χ²)) on each mini-batch; `.inf` does not truncate, and then rejects
            tokens with a weight above e^20 and counts them in `correction/extreme_tokens`.
        lower: the smallest weight; null takes 1/upper.
    """

    kind = "truncated"

    def __init__(
        self,
        level: Level = "token",
        upper: float | Literal["auto"] | None = None,
        lower: float | None = 0.0,
    ) -> None:
        if upper == "auto" and level != "sequence":
            raise ConfigError(
                "TruncatedIS measures its bound for sequence ratios alone.",
                expected="level: sequence with upper: auto",
                given=f"level: {level}",
                remedy="Set level to sequence, or give a number.",
            )
        super().__init__(level, lower, upper)


class MaskedIS(_Weights):
    """Multiplies by the ratio learner_old / sampler inside a band, by 0 outside (survey, "MIS"; IcePop for tokens).

    What is masked stays in the loss's denominator.

    Args:
        level: the ratio of each `token`, of the whole `sequence` (their product), or their `geometric` mean.
        lower: of the band; null takes 1/upper; the survey's one-sided form has 0.
        upper: of the band; null takes 2 for tokens, 5 for sequences and 2 for the geometric mean.
    """

    kind = "masked"

    def __init__(self, level: Level = "token", lower: float | None = None, upper: float | None = None) -> None:
        super().__init__(level, lower, upper)
