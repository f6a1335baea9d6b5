"""What truncated and masked importance sampling share: levels, default bounds, untruncated weights."""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from lit_qrl.functional._statistics import share
from lit_qrl.functional.importance import (
    adaptive_upper,
    geometric_masked,
    geometric_truncated,
    sequence_masked,
    sequence_truncated,
    token_masked,
    token_truncated,
)
from lit_qrl.functional.rejection import opsm_keep, ratio_keep, token_veto
from lit_qrl.types import Correction, LossContext

Level = Literal["token", "sequence", "geometric"]

# The peers' usual bounds: 2 for a token, 5 for a sequence; 2 for the geometric mean is QaRL's cap (its Table 2).
DEFAULT_UPPER: dict[Level, float] = {"token": 2.0, "sequence": 5.0, "geometric": 2.0}
# A weight of e^20 outweighs any batch. Only without an upper bound can it occur; then its tokens leave the loss and
# are counted, rather than that it is clamped in silence.
EXTREME = math.exp(20.0)


WEIGHTS = {
    ("truncated", "token"): token_truncated,
    ("truncated", "sequence"): sequence_truncated,
    ("truncated", "geometric"): geometric_truncated,
    ("masked", "token"): token_masked,
    ("masked", "sequence"): sequence_masked,
    ("masked", "geometric"): geometric_masked,
}
KEEPS = {"ratio": ratio_keep, "veto": token_veto, "off_policy": opsm_keep}


def weighted(
    kind: Literal["truncated", "masked"],
    level: Level,
    lower: float | None,
    upper: float | Literal["auto"],
    context: LossContext,
) -> Correction:
    """Return the weights, with the share of changed tokens (or sequences) under `correction/<kind>_<level>s`.

    Args:
        kind: what happens outside of the band; also the name of the metric.
        level: what one weight belongs to.
        lower: of the band.
        upper: of the band; `auto` measures it; weights beyond e^20 are rejected if it is no bound at all.
        context: of the mini-batch.
    """
    d, mask, all_reduce = context.log_ratio, context.mask, context.all_reduce
    weigh = WEIGHTS[kind, level]
    bound = adaptive_upper(d, mask, all_reduce) if upper == "auto" else upper
    weights, keep = weigh(d, mask, lower=lower, upper=bound), None
    changed = weights == 0 if kind == "masked" else weights != weigh(d, mask, lower=0.0, upper=math.inf)
    if level == "token":
        metrics = {f"correction/{kind}_tokens": share(mask, changed, all_reduce)}
    else:
        metrics = {f"correction/{kind}_sequences": share(mask.any(dim=1), (changed & mask).any(dim=1), all_reduce)}
    if isinstance(bound, Tensor):
        metrics["correction/upper"] = bound
    elif bound > EXTREME:
        keep = (weights <= EXTREME) | ~mask
        metrics["correction/extreme_tokens"] = all_reduce((~keep).sum())
        weights = torch.where(keep, weights, 1.0)
    return Correction(weights=weights, keep=keep, metrics=metrics)


def rejected(
    rule: Literal["ratio", "veto", "off_policy"],
    metric: str,
    count_rejected: bool,
    context: LossContext,
    **options: Any,
) -> Correction:
    """Return a rejection, with the share of rejected tokens (or sequences) under `correction/<metric>`.

    Args:
        rule: what rejects.
        metric: its name.
        count_rejected: leave the rejected in the loss's denominator: weights of 0 instead of keep = False.
        context: of the mini-batch.
        options: of the rule.
    """
    d, mask = context.log_ratio, context.mask
    signs = (context.advantages,) if rule == "off_policy" else ()
    keep = KEEPS[rule](d, mask, *signs, **options)
    if options.get("over") == "token":
        metrics = {f"correction/{metric}": share(mask, ~keep, context.all_reduce)}
    else:
        metrics = {f"correction/{metric}": share(mask.any(dim=1), ~keep.all(dim=1), context.all_reduce)}
    if count_rejected:
        return Correction(weights=keep.to(d.dtype), metrics=metrics)
    return Correction(keep=keep, metrics=metrics)
