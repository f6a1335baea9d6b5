"""The one list of metrics of the mismatch between learner and sampler."""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_qrl.functional._statistics import as_float, masked, precise
from lit_qrl.types import AllReduce, no_all_reduce

# Bins of the 99th percentile: logarithmic from 1e-7 (rounding of fp32 log-probs) to 1e2 (no model differs by more),
# 64 to a decade, so that a quantile is known to within 3.7 %.
SMALLEST_LOG_RATIO = 1e-7
DECADES = 9
BINS_PER_DECADE = 64


def k3_divergence(d: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return e^d − 1 − d, computed in fp64, where the subtraction leaves enough digits of a small `d`.

    >>> k3_divergence(torch.tensor([1e-4, 1.0]))
    tensor([5.0002e-09, 7.1828e-01])
    """
    wide = precise(d)
    return (torch.expm1(wide) - wide).to(d.dtype)


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
    position = values.log2() * (BINS_PER_DECADE / math.log2(10)) - BINS_PER_DECADE * math.log10(SMALLEST_LOG_RATIO)
    index = position.nan_to_num(0.0).ceil().clamp(0, bins).long()
    # A histogram for every row first: thousands of tokens in one bin would queue for one counter.
    rows = index.flatten(0, -2) if index.ndim > 1 else index[None]
    starts = torch.arange(0, rows.shape[0] * (bins + 1), bins + 1, device=rows.device)
    counts = torch.zeros(rows.shape[0] * (bins + 1), dtype=torch.float32, device=rows.device)
    counts.scatter_add_(0, (rows + starts[:, None]).flatten(), mask.flatten().float())
    # Integers add up to the same in any order.
    cumulative = all_reduce(counts.view(-1, bins + 1).sum(dim=0)).long().cumsum(0).to(counts.dtype)
    chosen = (cumulative < q * cumulative[-1]).sum()
    exponent = chosen.to(counts.dtype) * (math.log2(10) / BINS_PER_DECADE) + math.log2(SMALLEST_LOG_RATIO)
    return torch.exp2(exponent).to(values.dtype) * (chosen > 0)


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
    dtype = torch.promote_types(as_float(learner).dtype, as_float(sampler).dtype)
    learner, sampler = precise(learner.detach()), precise(sampler.detach())
    d = learner - sampler
    # Not `isfinite`, which is four kernels: only finite numbers have a difference to themselves.
    finite = mask & (d - d == 0)
    kept = masked(finite, torch.stack([d, learner, sampler]))
    d, learner, sampler = kept.unbind()
    ends = masked(finite, torch.stack([d, -d]), -torch.inf).amax(dim=(1, 2))
    ends = all_reduce(ends, op="max")
    top = ends[0].clamp(min=torch.finfo(d.dtype).min)
    # Effective sample size and CV do not change when all weights are scaled, so the largest is made 1.
    scaled = (d - top).exp()
    shift = torch.expm1(d)
    probability = kept[1:].exp()
    columns = [
        d,
        shift - d,
        d.abs(),
        (probability[0] - probability[1]).abs(),
        shift * (shift + 2),  # e^(2d) − 1
        shift.abs(),
        scaled,
        scaled.square(),
    ]
    tokens = masked(finite, torch.stack(columns)).sum(dim=(1, 2))
    row_count = finite.sum(dim=1)
    row_sum = kept.sum(dim=2)
    rows = row_count > 0
    perplexities = (-row_sum / row_count.clamp(min=1)).exp()
    sequences = masked(rows, torch.cat([torch.expm1(2 * row_sum[:1]), perplexities])).sum(dim=1)
    counts = torch.stack([row_count.sum(), rows.sum(), mask.sum()]).to(d.dtype)
    sums = all_reduce(torch.cat([counts, tokens, sequences]))
    n, sequence_count, total = sums[:3].unbind()
    token_means = sums[3:11] / n.clamp(min=1)
    d_mean, k3, abs_d, abs_p, chi2, abs_shift, mean_w, mean_w2 = token_means.unbind()
    chi2_sequence, ppl_ratio, learner_ppl, sampler_ppl = (sums[11:] / sequence_count.clamp(min=1)).unbind()
    some = n > 0
    variance = (mean_w2 - mean_w.square()).clamp(min=0) * (n / (n - 1).clamp(min=1))
    ratio_max, ratio_min = masked(some, torch.stack([ends[0], -ends[1]])).exp().unbind()
    figures = {
        "kl_k1": -d_mean,
        "kl_k3": k3,
        "abs_log_ratio": abs_d,
        "abs_prob_diff": abs_p,
        "ess_ratio": torch.where(some, mean_w.square() / mean_w2, 1.0),
        "chi2_token": chi2,
        "chi2_sequence": chi2_sequence,
        "tv": abs_shift / 2,
        "weight_cv": masked(some, variance.sqrt() / mean_w),
        "ppl_ratio": ppl_ratio,
        "learner_ppl": learner_ppl,
        "sampler_ppl": sampler_ppl,
        "ratio_max": ratio_max,
        "ratio_min": ratio_min,
        "log_ratio_p99": log_quantile(d.abs(), finite, 0.99, all_reduce=all_reduce),
        "nonfinite": total - n,
    }
    return dict(zip(figures, torch.stack(list(figures.values())).to(dtype).unbind(), strict=True))
