"""Counts and shares behind the plots: where in probability, position and length the mismatch sits."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lit_qrl.functional._statistics import as_float, masked_sums
from lit_qrl.types import AllReduce, no_all_reduce

# An odd multiplier with well mixed bits (2^64 / golden ratio, as a signed number) for the rolling hash of n-grams.
HASH_MULTIPLIER = -7046029254386353131
NO_NGRAM = torch.iinfo(torch.int64).max
# Update ratios are told apart to a thousandth, up to e^2 either side: no clip is wider, and a ratio of 1 is exact.
RATIO_STEP, RATIO_LIMIT = 1e-3, 2.0


def _counts(index: Tensor, hit: Tensor, size: int, all_reduce: AllReduce) -> Tensor:
    counts = torch.zeros(size, dtype=torch.float32, device=index.device)
    counts.scatter_add_(0, index.flatten(), hit.flatten().float())
    return all_reduce(counts)


def _means(index: Tensor, hit: Tensor, values: Tensor, size: int, all_reduce: AllReduce) -> tuple[Tensor, Tensor]:
    """Return the mean of the values that are hit in each bin, and their number."""
    count = _counts(index, hit, size, all_reduce)
    return _counts(index, torch.where(hit, as_float(values), 0.0), size, all_reduce) / count.clamp(min=1), count


def _bin(values: Tensor, low: float, high: float, bins: int) -> Tensor:
    """Return the bin of each value, the outer bins taking what lies beyond."""
    return ((values - low) * (bins / (high - low))).nan_to_num(0.0).floor().clamp(0, bins - 1).long()


def histogram2d_by_sign(
    values: Float[Tensor, "b t"],
    logprobs: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    advantages: Float[Tensor, " b"],
    limit: float = 1.0,
    bins: tuple[int, int] = (40, 20),
    *,
    all_reduce: AllReduce = no_all_reduce,
) -> Float[Tensor, "2 values probabilities"]:
    """Return token counts over (value, probability), for negative and for positive samples.

    QaRL Fig. 4 with the log mismatch weight and the sampler's log-probs, Fig. 5 with the log update ratio and
    learner_old's. Samples of advantage 0 are in neither.

    Args:
        values: "b t", nats; cut into equal bins from −limit to limit, the outer ones open.
        logprobs: "b t", nats; the probability is cut into equal bins from 0 to 1.
        mask: completion tokens that count.
        advantages: " b"; index 0 of the result holds A < 0, index 1 holds A > 0.
        limit: largest value told apart, nats.
        bins: of the values, of the probabilities.
        all_reduce: adds the counts of all ranks.

    >>> one = torch.ones(1, 1)
    >>> counts = histogram2d_by_sign(0.3 * one, -0.1 * one, one.bool(), torch.tensor([-1.0]), 1.0, (4, 2))
    >>> counts[0].tolist(), float(counts[1].sum())
    ([[0.0, 0.0], [0.0, 0.0], [0.0, 1.0], [0.0, 0.0]], 0.0)
    """
    n, m = bins
    cell = _bin(as_float(values), -limit, limit, n) * m + _bin(as_float(logprobs).exp(), 0.0, 1.0, m)
    sign = (advantages > 0).long()[:, None]
    hit = mask & (advantages != 0)[:, None]
    return _counts(sign * (n * m) + cell, hit, 2 * n * m, all_reduce).view(2, n, m)


def ratio_counts(log_ratio: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]) -> Float[Tensor, " bins"]:
    """Return token counts over the log-ratio, in bins of 0.001 nats around 0; they add up over batches and ranks.

    Args:
        log_ratio: "b t", nats.
        mask: tokens that count.

    >>> counts = ratio_counts(torch.tensor([[0.0, 0.1]]), torch.ones(1, 2, dtype=torch.bool))
    >>> counts.nonzero().flatten().tolist()
    [2000, 2100]
    """
    half = round(RATIO_LIMIT / RATIO_STEP)
    index = (as_float(log_ratio) / RATIO_STEP).nan_to_num(0.0).round().clamp(-half, half).long() + half
    return _counts(index, mask, 2 * half + 1, no_all_reduce)


def ratio_quantiles(counts: Float[Tensor, " bins"], levels: list[float]) -> Float[Tensor, " levels"]:
    """Return quantiles of the ratio e^d from the counts of `ratio_counts`, to within 0.1 %, 1 where nothing counts.

    Args:
        counts: as `ratio_counts` gives them, added up.
        levels: each in (0, 1).

    >>> counts = ratio_counts(torch.tensor([[0.0, 0.1]]), torch.ones(1, 2, dtype=torch.bool))
    >>> ratio_quantiles(counts, [0.01, 0.99])
    tensor([1.0000, 1.1052])
    """
    cumulative = counts.long().cumsum(0).double()  # of integers, which add up to the same in any order
    chosen = torch.stack([(cumulative < level * cumulative[-1]).sum() for level in levels])
    half = counts.shape[0] // 2
    return torch.where(cumulative[-1] > 0, ((chosen - half).float() * RATIO_STEP).exp(), 1.0).float()


def mean_by_position(
    values: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    bins: int = 16,
    length: int | None = None,
    *,
    all_reduce: AllReduce = no_all_reduce,
) -> tuple[Float[Tensor, " bins"], Float[Tensor, " bins"]]:
    """Return the mean of values by position in the completion, and the number of tokens in each bin.

    Args:
        values: "b t", such as |d| or its k3 divergence, in nats; what they are outside of the mask does not matter.
        mask: completion tokens that count.
        bins: equal parts of the completion limit.
        length: the completion limit, in tokens; None is the number of columns. Ranks must agree on it.
        all_reduce: adds up over ranks.

    >>> mean, count = mean_by_position(torch.tensor([[0.1, 0.3]]), torch.ones(1, 2, dtype=torch.bool), bins=2)
    >>> [round(float(x), 1) for x in mean]
    [0.1, 0.3]
    """
    t = mask.shape[1]
    position = torch.arange(t, device=values.device) * bins // (length or t)
    return _means(position.clamp(max=bins - 1).expand_as(mask), mask, values, bins, all_reduce)


def mean_by_turn(
    values: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    turns: int = 4,
    *,
    all_reduce: AllReduce = no_all_reduce,
) -> tuple[Float[Tensor, " turns"], Float[Tensor, " turns"]]:
    """Return the mean of values by the sampler's turn, and the number of tokens in each.

    A turn is a run of masked tokens; what stands between two is the environment's, such as a tool's output. Tokens of
    the first turn have none before them.

    Args:
        values: "b t", such as |d| in nats.
        mask: what the sampler drew, without gaps within a turn.
        turns: told apart; the last takes all that come later.
        all_reduce: adds up over ranks.

    >>> mask = torch.tensor([[True, False, True]])
    >>> mean_by_turn(torch.tensor([[0.25, 9.0, 0.75]]), mask, 2)
    (tensor([0.2500, 0.7500]), tensor([1., 1.]))
    """
    begins = mask & ~torch.nn.functional.pad(mask[:, :-1], (1, 0))
    index = (begins.cumsum(dim=1) - 1).clamp(0, turns - 1)
    return _means(index, mask, values, turns, all_reduce)


def accepted_by_length(
    keep: Bool[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    bins: int = 8,
    length: int | None = None,
    *,
    all_reduce: AllReduce = no_all_reduce,
) -> tuple[Float[Tensor, " bins"], Float[Tensor, " bins"]]:
    """Return the share of sequences of which a token is kept, by their length, and the number of sequences.

    Args:
        keep: "b t", what the rejections left.
        mask: completion tokens that count; sequences without any are not counted.
        bins: equal parts of the completion limit: of lengths 1 to `length`.
        length: the completion limit, in tokens; None is the number of columns. Ranks must agree on it.
        all_reduce: adds up over ranks.

    >>> mask = torch.tensor([[True, False], [True, True]])
    >>> share, count = accepted_by_length(torch.tensor([[True, True], [False, False]]), mask, bins=2)
    >>> share.tolist(), count.tolist()
    ([1.0, 0.0], [1.0, 1.0])
    """
    lengths = mask.sum(dim=1)
    index = ((lengths - 1) * bins // (length or mask.shape[1])).clamp(0, bins - 1)
    return _means(index, lengths > 0, (mask & keep).any(dim=1), bins, all_reduce)


def repeated_ngrams(tokens: Int[Tensor, "b t"], mask: Bool[Tensor, "b t"], n: int = 4) -> Float[Tensor, " b"]:
    """Return the share of each completion's n-grams that occurred before in it; 0 where there is no n-gram.

    Repetition marks the error tokens of QaRL §3.2. N-grams are compared by a 64-bit hash.

    Args:
        tokens: "b t", ids of the completion's tokens.
        mask: True on the completion's tokens, from the first on without a gap.
        n: length of an n-gram.

    >>> repeated_ngrams(torch.tensor([[5, 6, 5, 6, 5]]), torch.ones(1, 5, dtype=torch.bool), n=2)
    tensor([0.5000])
    """
    if n < 1:
        raise ValueError(f"An n-gram has at least one token. Expected: n >= 1. Given: {n}. Raise n.")
    if mask.shape[1] < n:
        return torch.zeros(mask.shape[0], device=mask.device)
    windows = mask.shape[1] - n + 1
    key = torch.zeros_like(tokens[:, :windows], dtype=torch.int64)
    for offset in range(n):
        key = (key ^ (tokens[:, offset : offset + windows].long() + 1)) * HASH_MULTIPLIER
        key = key ^ (key >> 29)
    valid = mask[:, n - 1 :]
    ordered = torch.where(valid, key, NO_NGRAM).sort(dim=1).values
    repeated = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != NO_NGRAM)).sum(dim=1)
    return repeated.float() / valid.sum(dim=1).clamp(min=1)


def low_probability_share(
    logprobs: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    advantages: Float[Tensor, " b"],
    threshold: float = 0.05,
    *,
    all_reduce: AllReduce = no_all_reduce,
) -> Float[Tensor, ""]:
    """Return the share of the tokens of negative samples whose probability is below the threshold.

    QaRL §3.2: error tokens are rare in positive samples and sit at low probability in negative ones.

    Args:
        logprobs: "b t", nats, of the learner at the moment of the rollout.
        mask: completion tokens that count.
        advantages: " b".
        threshold: a probability.
        all_reduce: makes the share global over ranks.

    >>> logprobs = torch.tensor([[0.01, 0.9]]).log()
    >>> low_probability_share(logprobs, torch.ones(1, 2, dtype=torch.bool), torch.tensor([-1.0]))
    tensor(0.5000)
    """
    low = (as_float(logprobs).exp() < threshold).float()
    count, total = masked_sums(mask & (advantages < 0)[:, None], low, all_reduce=all_reduce)
    return total / count.clamp(min=1)


QUADRANTS = ("positive_above", "positive_below", "negative_above", "negative_below")
"""Sign of the advantage, and whether the learner finds the token likelier than the sampler did."""


def quadrant_shares(
    d: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    advantages: Float[Tensor, " b"],
    *,
    all_reduce: AllReduce = no_all_reduce,
) -> Float[Tensor, " 4"]:
    """Return the share of Σ|d| that lies in each of `QUADRANTS`; what is left is of advantages of 0.

    After TRIAGE (arXiv:2610.07043): under 4 bits tokens with a negative advantage that the learner finds less likely
    than the sampler gather before the mismatch spreads.

    Args:
        d: "b t", nats, learner minus sampler.
        mask: completion tokens that count.
        advantages: " b".
        all_reduce: makes the shares global over ranks.

    >>> d = torch.tensor([[0.1, -0.1], [0.3, -0.5]])
    >>> quadrant_shares(d, torch.ones(2, 2, dtype=torch.bool), torch.tensor([1.0, -1.0]))
    tensor([0.1000, 0.1000, 0.3000, 0.5000])
    """
    d, sign = as_float(d), advantages.sign()[:, None]
    parts = [d.abs() * (d * gap > 0) * (sign == side) for side in (1, -1) for gap in (1, -1)]
    totals = masked_sums(mask, d.abs(), *parts, all_reduce=all_reduce)
    return totals[2:] / totals[1].clamp(min=torch.finfo(totals.dtype).tiny)


def router_shift(
    now: Float[Tensor, "b t layers k"], before: Float[Tensor, "b t layers k"], floor: float
) -> Float[Tensor, "b t"]:
    """Return γ = max(floor, exp(−mean over layers and experts of |log r − log r_old|)), without a gradient.

    r is what a router gives an expert that the token took: 1 where nothing moved, less the farther the routers are.
    After the router-shift ratio of RSPO, Zhang et al., arXiv:2510.23027, which rescales the importance ratio by it
    before it is clipped.

    Args:
        now: log-probs of the routers that are trained.
        before: those of learner_old.
        floor: in (0, 1].

    >>> before = torch.tensor([[[[0.5, 0.25]]]]).log()
    >>> router_shift(before + torch.tensor([0.1, -0.3]), before, 0.5), router_shift(before - 9, before, 0.5)
    (tensor([[0.8187]]), tensor([[0.5000]]))
    """
    moved = (as_float(now.detach()) - as_float(before)).abs().flatten(2).mean(dim=2)
    return torch.exp(-moved).clamp(min=floor)
