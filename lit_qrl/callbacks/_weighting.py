"""What truncated and masked importance sampling share: levels, default bounds, untruncated weights."""

import math
from typing import Literal

import torch
from torch import Tensor

from lit_qrl.functional._statistics import share
from lit_qrl.types import Correction, LossContext

Level = Literal["token", "sequence", "geometric"]

# The peers' usual bounds: 2 for a token, 5 for a sequence; 2 for the geometric mean is QaRL's cap (its Table 2).
DEFAULT_UPPER: dict[Level, float] = {"token": 2.0, "sequence": 5.0, "geometric": 2.0}
# A weight of e^20 outweighs any batch. Only without an upper bound can it occur; then its tokens leave the loss and
# are counted, rather than that it is clamped in silence.
EXTREME = math.exp(20.0)


def weighted(
    name: str, level: Level, upper: float | Tensor, weights: Tensor, changed: Tensor, context: LossContext
) -> Correction:
    """Return the correction, with the share of changed tokens (or sequences) under `correction/<name>_<level>s`.

    Args:
        name: of the metric.
        level: what one weight belongs to.
        upper: the bound that was used; weights beyond e^20 are rejected if it is no bound at all.
        weights: "b t".
        changed: "b t", where the weight is not the plain ratio.
        context: of the mini-batch.
    """
    mask = context.mask
    if level == "token":
        metrics = {f"correction/{name}_tokens": share(mask, changed, context.all_reduce)}
    else:
        metrics = {
            f"correction/{name}_sequences": share(mask.any(dim=1), (changed & mask).any(dim=1), context.all_reduce)
        }
    if isinstance(upper, Tensor) or upper <= EXTREME:
        return Correction(weights=weights, metrics=metrics)
    keep = (weights <= EXTREME) | ~mask
    metrics["correction/extreme_tokens"] = context.all_reduce((~keep).sum())
    return Correction(weights=torch.where(keep, weights, 1.0), keep=keep, metrics=metrics)


def rejected(name: str, keep: Tensor, count_rejected: bool, context: LossContext) -> Correction:
    """Return the rejection of whole sequences, with their share under `correction/<name>_sequences`.

    Args:
        name: of the metric.
        keep: "b t", True where `mask` is False.
        count_rejected: leave the rejected in the loss's denominator: weights of 0 instead of keep = False.
        context: of the mini-batch.
    """
    metrics = {f"correction/{name}_sequences": share(context.mask.any(dim=1), ~keep.all(dim=1), context.all_reduce)}
    if count_rejected:
        return Correction(weights=keep.to(context.log_ratio.dtype), metrics=metrics)
    return Correction(keep=keep, metrics=metrics)
