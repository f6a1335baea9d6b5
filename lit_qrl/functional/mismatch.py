"""The one list of metrics of the mismatch between learner and sampler."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_qrl.functional._statistics import (
    as_float,
    largest,
    masked,
    masked_sums,
    require_tokens,
    row_means,
    row_sums,
    smallest,
)
from lit_qrl.types import AllReduce, no_all_reduce

# Bins of the 99th percentile: logarithmic from 1e-7 (rounding of fp32 log-probs) to 1e2 (no model differs by more),
# 64 to a decade, so that a quantile is known to within 3.7 %.
SMALLEST_LOG_RATIO = 1e-7
DECADES = 9
BINS_PER_DECADE = 64
# Below this the Taylor series of e^d − 1 − d is exact to fp64 with the terms used, and above it the subtraction loses
# at most three digits.
SERIES_BELOW = 1e-2


def k3_divergence(d: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return e^d − 1 − d, without the cancellation that would eat all digits of a small `d`.

    >>> k3_divergence(torch.tensor([1e-4, 1.0]))
    tensor([5.0002e-09, 7.1828e-01])
    """
    small = torch.where(d.abs() < SERIES_BELOW, d, 0.0)
    series = small.square() * (1 / 2 + small * (1 / 6 + small * (1 / 24 + small * (1 / 120 + small / 720))))
    return torch.where(d.abs() < SERIES_BELOW, series, torch.expm1(d) - d)


def log_quantile(
    values: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    q: float,
    *,
    all_reduce: AllReduce = no_all_reduce,
) -> Float[Tensor, ""]:
    """Return the q-quantile of non-negative values from a logarithmic histogram, to within 3.7 %.

    The upper edge of the bin that holds it; 0 when it lies below 1e-7. A histogram adds up over ranks, which a sort
    does not.

    Args:
        values: any shape, non-negative.
        mask: entries that count.
        q: in (0, 1).
        all_reduce: adds the histograms of all ranks.

    >>> values = torch.linspace(0.001, 1.0, 1000)
    >>> round(float(log_quantile(values, values > 0, 0.99)), 2)
    1.0
    """
    bins = DECADES * BINS_PER_DECADE
    position = (values / SMALLEST_LOG_RATIO).clamp(min=1e-30).log10() * BINS_PER_DECADE
    index = masked(mask, position.ceil(), 0.0).clamp(0, bins).long()
    # A histogram for every row first: thousands of tokens in one bin would queue for one counter.
    rows = index.flatten(0, -2) if index.ndim > 1 else index[None]
    offset = torch.arange(rows.shape[0], device=rows.device)[:, None] * (bins + 1)
    counts = values.new_zeros(rows.shape[0] * (bins + 1))
    counts.scatter_add_(0, (rows + offset).flatten(), mask.to(values.dtype).flatten())
    cumulative = all_reduce(counts.view(rows.shape[0], bins + 1).sum(dim=0)).cumsum(0)
    chosen = (cumulative < q * cumulative[-1]).sum()
    edge = SMALLEST_LOG_RATIO * 10.0 ** (chosen.to(values.dtype) / BINS_PER_DECADE)
    return torch.where(chosen > 0, edge, 0.0)


def mismatch_metrics(
    learner: Float[Tensor, "b t"],
    sampler: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    *,
    all_reduce: AllReduce = no_all_reduce,
) -> dict[str, Tensor]:
    """Return how far the sampler is from the learner, as 0-dim tensors by name.

    With d = learner − sampler and w = e^d, tokens drawn by the sampler, means over masked tokens with finite d:

    ================ ================================================ ===========================================
    kl_k1            mean(−d)                                         KL(sampler‖learner), unbiased, may be < 0
    kl_k3            mean(e^d − 1 − d)                                the same, never negative
    abs_log_ratio    mean|d|                                          AIS eq. 13
    abs_prob_diff    mean|p_learner − p_sampler|                      AIS Fig. 4, middle
    ess_ratio        (Σw)² / (n Σw²)                                  survey, "Seq-IS"; AIS Fig. 4, right
    chi2_token       mean(w²) − 1                                     survey, χ²(learner‖sampler) of one token
    chi2_sequence    mean over sequences of e^(2Σd) − 1               the same of whole sequences
    tv               mean|w − 1| / 2                                  survey, total variation
    weight_cv        std(w) / mean(w), ddof = 1                       AIS Fig. 3
    ppl_ratio        mean over sequences of exp(−mean d)              sampled tokens' perplexity, learner / sampler
    learner_ppl      mean over sequences of exp(−mean log p_learner)
    sampler_ppl      the same of the sampler
    ratio_max/min    of w
    log_ratio_p99    99th percentile of |d|, to within 3.7 %
    nonfinite        number of masked tokens whose d is not finite
    ================ ================================================ ===========================================

    Nothing is clamped: χ² of sequences is infinite where fp32 cannot hold it.

    Args:
        learner: "b t", nats, learner_old.
        sampler: "b t", nats.
        mask: completion tokens that count.
        all_reduce: makes every figure global over ranks.

    >>> learner, sampler = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.1, -2.0]])
    >>> metrics = mismatch_metrics(learner, sampler, torch.ones(1, 2, dtype=torch.bool))
    >>> round(float(metrics["abs_log_ratio"]), 4), round(float(metrics["kl_k3"]), 5)
    (0.05, 0.00259)
    """
    require_tokens(mask)
    learner, sampler = as_float(learner.detach()), as_float(sampler.detach())
    d = masked(mask, learner - sampler)
    finite = mask & d.isfinite()
    nonfinite = all_reduce((mask & ~finite).sum())
    d, learner, sampler = masked(finite, d), masked(finite, learner), masked(finite, sampler)
    d_max, d_min = largest(finite, d, all_reduce), smallest(finite, d, all_reduce)
    top = torch.where(d_max > -torch.inf, d_max, 0.0)
    # Effective sample size and CV do not change when all weights are scaled, so the largest is made 1.
    scaled = (d - top).exp()
    token = masked_sums(
        finite,
        -d,
        k3_divergence(d),
        d.abs(),
        (learner.exp() - sampler.exp()).abs(),
        torch.expm1(2 * d),
        torch.expm1(d).abs(),
        scaled,
        scaled.square(),
        all_reduce=all_reduce,
    )
    n = token[0].clamp(min=1)
    k1, k3, abs_d, abs_p, chi2, tv, mean_w, mean_w2 = (token[1:] / n).unbind()
    spread = masked_sums(finite, (scaled - mean_w).square(), all_reduce=all_reduce)[1]
    rows = finite.any(dim=1)
    sequence = masked_sums(
        rows,
        torch.expm1(2 * row_sums(finite, d)),
        (-row_means(finite, d)).exp(),
        (-row_means(finite, learner)).exp(),
        (-row_means(finite, sampler)).exp(),
        all_reduce=all_reduce,
    )
    chi2_sequence, ppl_ratio, learner_ppl, sampler_ppl = (sequence[1:] / sequence[0].clamp(min=1)).unbind()
    some = token[0] > 0
    return {
        "kl_k1": k1,
        "kl_k3": k3,
        "abs_log_ratio": abs_d,
        "abs_prob_diff": abs_p,
        "ess_ratio": torch.where(some, mean_w.square() / torch.where(some, mean_w2, 1.0), 1.0),
        "chi2_token": chi2,
        "chi2_sequence": chi2_sequence,
        "tv": tv / 2,
        "weight_cv": (spread / (n - 1).clamp(min=1)).sqrt() / torch.where(some, mean_w, 1.0),
        "ppl_ratio": ppl_ratio,
        "learner_ppl": learner_ppl,
        "sampler_ppl": sampler_ppl,
        "ratio_max": torch.where(some, d_max, 0.0).exp(),
        "ratio_min": torch.where(some, d_min, 0.0).exp(),
        "log_ratio_p99": log_quantile(d.abs(), finite, 0.99, all_reduce=all_reduce),
        "nonfinite": nonfinite,
    }
