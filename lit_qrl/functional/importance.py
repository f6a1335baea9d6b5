"""Importance weights for the mismatch between learner and sampler; its rejections are in `functional.rejection`.

`d` is the log-ratio learner_old − sampler, "b t", in nats, exactly 0 where `mask` is False. Weights are 1 and keeps
True where `mask` is False. Every band holds 1, so that equal policies give weights of exactly 1.0. A sequence
without tokens has ratio 1. Log-ratios are never clamped: e^d of a non-finite or huge `d` is what it is.
"""

import math
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_qrl.errors import check_choice
from lit_qrl.functional._checks import Bound, check_band
from lit_qrl.functional._statistics import as_float, largest, masked, masked_sums, row_means
from lit_qrl.types import AllReduce, no_all_reduce

Weights = Float[Tensor, "b t"]
Level = Literal["token", "sequence", "geometric"]


def log_ratio(
    learner: Float[Tensor, "b t"], sampler: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]
) -> Float[Tensor, "b t"]:
    """Return d = learner − sampler per token, detached, exactly 0 where `mask` is False.

    log w_mismatch of QaRL eq. 3, log ρ_t of AIS eq. 7.

    Args:
        learner: "b t", nats, of the learner that is to be followed (learner_old).
        sampler: "b t", nats, of the engine.
        mask: completion tokens that count.

    >>> log_ratio(torch.tensor([[-1.0, -9.0]]), torch.tensor([[-1.5, 0.0]]), torch.tensor([[True, False]]))
    tensor([[0.5000, 0.0000]])
    """
    return masked(mask, as_float(learner.detach()) - as_float(sampler.detach()))


def _log_ratios(d: Tensor, mask: Tensor, level: Level) -> Tensor:
    """Return the logarithms of the ratios of tokens "b t", or of sequences "b 1"."""
    d = as_float(d)
    if level == "token":
        return d
    total = d.sum(dim=1, keepdim=True)
    return total if level == "sequence" else total / mask.sum(dim=1, keepdim=True).clamp(min=1)


def _spread(weights: Tensor, mask: Tensor) -> Tensor:
    """Return one weight per token; where a token has its own, it is 1 in the padding already, since d is 0 there."""
    return weights if weights.shape == mask.shape else masked(mask, weights, 1.0)


def truncated_weights(
    d: Weights, mask: Bool[Tensor, "b t"], upper: Bound, lower: float | None = 0.0, level: Level = "token"
) -> Weights:
    """Return the ratio of a token, or on each token that of its sequence, clamped into [lower, upper].

    Truncated importance sampling (TIS), by level:

    - `token`: min(ρ_t, C) with ρ_t = e^d, AIS eq. 8 (FlashRL); survey "Token-TIS". With upper = inf it is the
      untruncated form of NeMo-RL;
    - `sequence`: min(Π_t ρ_t, C), survey "Sequence-TIS";
    - `geometric`: (Π_t ρ_t)^(1/T), survey "Geo-RS", used as a weight: w_seq-mismatch of QaRL §3.2 with lower = 1/upper.

    Args:
        d: "b t", nats.
        mask: completion tokens that count.
        upper: C >= 1; a 0-dim tensor is taken as a measured bound, such as that of `adaptive_upper`.
        lower: in [0, 1]; None is 1/upper.
        level: whose ratio it is.

    Raises:
        ConfigError: the band does not hold 1.

    >>> d, mask = torch.tensor([[0.0, 3.0, -1.0]]), torch.ones(1, 3, dtype=torch.bool)
    >>> truncated_weights(d, mask, 2.0), truncated_weights(d, mask, 2.0, level="geometric")
    (tensor([[1.0000, 2.0000, 0.3679]]), tensor([[1.9477, 1.9477, 1.9477]]))
    """
    bottom = check_band(lower, upper)
    weights = _log_ratios(d, mask, level).exp()
    if isinstance(upper, Tensor):
        weights = torch.minimum(weights, upper)
    elif upper < math.inf:
        weights = weights.clamp(max=upper)
    if isinstance(bottom, Tensor):
        weights = torch.maximum(weights, bottom)
    elif bottom > 0:
        weights = weights.clamp(min=bottom)
    return _spread(weights, mask)


def masked_weights(
    d: Weights, mask: Bool[Tensor, "b t"], lower: float | None, upper: Bound, level: Level = "token"
) -> Weights:
    """Return the ratio of a token, or on each token that of its sequence, inside [lower, upper] and 0 outside.

    Masked importance sampling (MIS), IcePop: I(lower <= ρ_t <= upper)·ρ_t, survey "Token-level MIS"; for `sequence`
    I(ρ <= C)·ρ, survey "Sequence-MIS" with lower = 0. A weight of 0 stays in the loss's denominator.

    Arguments and errors as in `truncated_weights`.

    >>> d, mask = torch.tensor([[0.0, 3.0, -1.0]]), torch.ones(1, 3, dtype=torch.bool)
    >>> masked_weights(d, mask, None, 2.0), masked_weights(d, mask, None, 2.0, level="sequence")
    (tensor([[1., 0., 0.]]), tensor([[0., 0., 0.]]))
    """
    bottom = check_band(lower, upper)
    weights = _log_ratios(d, mask, level).exp()
    return _spread(masked((weights >= bottom) & (weights <= upper), weights), mask)


def truncated_share(d: Weights, mask: Bool[Tensor, "b t"], upper: float) -> Weights:
    """Return min(e^d, C)/e^d per token, in (0, 1]: what `truncated_weights` leaves of the ratio; QuRL's r.

    Args:
        d: "b t", nats.
        mask: completion tokens that count.
        upper: C >= 1.

    Raises:
        ConfigError: the bound is below 1.

    >>> truncated_share(torch.tensor([[0.0, math.log(4.0)]]), torch.ones(1, 2, dtype=torch.bool), 2.0)
    tensor([[1.0000, 0.5000]])
    """
    check_band(0.0, upper)
    return masked(mask, (math.log(upper) - as_float(d)).clamp(max=0.0), 0.0).exp()


def adaptive_upper(d: Weights, mask: Bool[Tensor, "b t"], all_reduce: AllReduce = no_all_reduce) -> Float[Tensor, ""]:
    """Return the truncation bound for sequence ratios that minimises the survey's bound on the error.

    C* = sqrt(2 (1 + χ²)) with 1 + χ² = E[ρ²], ρ = e^(Σ d), over the batch's non-empty sequences (survey,
    "Sequence-TIS"). Computed from log-sum-exp, so that it overflows only where C* itself does.

    Args:
        d: "b t", nats.
        mask: completion tokens that count.
        all_reduce: makes the mean global over ranks.

    >>> round(float(adaptive_upper(torch.zeros(3, 4), torch.ones(3, 4, dtype=torch.bool))), 4)
    1.4142
    """
    doubled = 2.0 * _log_ratios(d, mask, "sequence")[:, 0]
    rows = mask.any(dim=1)
    top = largest(rows, doubled, all_reduce).clamp(min=torch.finfo(doubled.dtype).min)
    count, total = masked_sums(rows, (doubled - top).exp(), all_reduce=all_reduce)
    log_second_moment = top + total.log() - count.log()
    # A batch without any sequence has nothing to correct: C* of equal policies.
    return torch.where(count > 0, (0.5 * (math.log(2.0) + log_second_moment)).exp(), math.sqrt(2.0))


def batch_normalized(
    weights: Weights,
    mask: Bool[Tensor, "b t"],
    level: str = "token",
    *,
    all_reduce: AllReduce = no_all_reduce,
) -> Weights:
    """Return weights divided by their mean over the batch's tokens, or over its sequences.

    w / mean(w): self-normalised importance sampling (survey, "Seq-IS"). Weights that are all 0 stay as they are.

    Args:
        weights: "b t".
        mask: completion tokens that count.
        level: "token" for the mean over tokens, "sequence" for the mean over sequences of the token mean.
        all_reduce: makes the mean global over ranks.

    Raises:
        ConfigError: an unknown level.

    >>> batch_normalized(torch.tensor([[1.0, 3.0]]), torch.ones(1, 2, dtype=torch.bool))
    tensor([[0.5000, 1.5000]])
    """
    check_choice("level", level, ("token", "sequence"))
    weights = as_float(weights)
    if level == "token":
        count, total = masked_sums(mask, weights, all_reduce=all_reduce)
    else:
        count, total = masked_sums(mask.any(dim=1), row_means(mask, weights), all_reduce=all_reduce)
    mean = total / count.clamp(min=1)
    return masked(mask, weights / torch.where(mean > 0, mean, 1.0), 1.0)
