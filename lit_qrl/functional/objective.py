"""The losses of the objectives, per token; `reduction.py` makes a scalar of them.

Every function returns `ObjectiveTerms`: a loss "b t" that is 0 where `mask` is False (what belongs to a whole
sequence stands on each of its tokens), and metrics, each a vector (sum, count) that adds up over micro-batches and
ranks before it is divided. `update/kl` is the k3 estimate of KL(old‖new), `update/ratio` the mean ratio,
`update/clip_fraction_{low,high}_{positive,negative}` the share of the tokens with an advantage of that sign whose
ratio lies beyond that edge.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_qrl.functional._checks import check_above, check_clip
from lit_qrl.functional._statistics import as_float, masked, row_means
from lit_qrl.functional.mismatch import k3_divergence
from lit_qrl.types import ObjectiveTerms

LogProbs = Float[Tensor, "b t"]
Advantages = Float[Tensor, " b"]
Mask = Bool[Tensor, "b t"]


LARGEST = 80.0
"""Nats of the largest ratio that is computed where a clip is far below it: e⁸⁰ is finite in fp32, and 0 times it 0."""


def _ratio(log_ratio: Tensor, bounded: Tensor | bool) -> Tensor:
    """Return e^log_ratio, of at most `LARGEST` nats where the loss is `bounded` from there on and has no gradient."""
    if bounded is True:
        return log_ratio.clamp(max=LARGEST).exp()
    return torch.where(torch.as_tensor(bounded), log_ratio.clamp(max=LARGEST), log_ratio).exp()


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    return masked(mask, as_float(logprobs) - as_float(old_logprobs.detach()))


def _sequence_ratio(logprobs: Tensor, log_ratio: Tensor, mask: Tensor, bounded: Tensor | bool) -> Tensor:
    """Return s = exp(mean_t log r_t) on every token, with the gradient s ∇log p_t of that token alone: "b t".

    s_t = sg(s)·p_t / sg(p_t), GSPO-token (Zheng et al. 2025). Where all tokens of a sequence have the same
    factor it has the gradient of s itself; where they have their own, each acts on its token.
    """
    here = masked(mask, as_float(logprobs))
    return _ratio(row_means(mask, log_ratio.detach())[:, None] + (here - here.detach()), bounded)


def _terms(
    loss: Tensor,
    mask: Tensor,
    weights: Tensor | None,
    log_ratio: Tensor,
    ratio: Tensor,
    advantages: Tensor,
    edges: tuple[float | Tensor, float | Tensor] | None,
) -> ObjectiveTerms:
    if weights is not None:
        loss = loss * weights
    with torch.no_grad():
        ratio = ratio.detach().expand_as(mask)
        columns = [k3_divergence(log_ratio.detach()), ratio]
        counts = [mask, mask]
        names = ["update/kl", "update/ratio"]
        if edges is not None:
            beyond = {"low": ratio < edges[0], "high": ratio > edges[1]}
            signs = {"positive": advantages[:, None] > 0, "negative": advantages[:, None] < 0}
            for side, outside in beyond.items():
                for sign, rows in signs.items():
                    names.append(f"update/clip_fraction_{side}_{sign}")
                    columns.append((outside & rows).to(ratio.dtype))
                    counts.append(mask & rows)
        sums = masked(mask, torch.stack(columns)).flatten(1).sum(dim=1)
        pairs = torch.stack([sums, torch.stack(counts).flatten(1).sum(dim=1).to(sums.dtype)], dim=1)
    return ObjectiveTerms(masked(mask, loss.expand_as(mask)), dict(zip(names, pairs.unbind(), strict=True)))


def _clipped_gain(ratio: Tensor, advantages: Tensor, low: float, high: float | Tensor) -> Tensor:
    return torch.minimum(ratio * advantages, ratio.clamp(min=low).clamp(max=high) * advantages)


def clipped_surrogate(
    logprobs: LogProbs,
    old_logprobs: LogProbs,
    advantages: Advantages,
    mask: Mask,
    weights: LogProbs | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    share: LogProbs | None = None,
) -> ObjectiveTerms:
    """Return the clipped loss of GRPO, −w·min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A).

    AIS eqs. 4 and 19, QaRL §2.1; with `clip_high=0.28` and the reduction "token" it is DAPO's. With `dual_clip` = c
    the term in brackets is max(·, c·A) where A < 0, so that its gradient ends at r = c (QaRL §3.2, after Ye et al.).
    With `share` the upper edge is (1 + clip_high)/share (QuRL's adaptive clipping range, arXiv:2602.13953): a truncated
    weight w = share·ρ then ends at the (1 + clip_high)·ρ of the whole one.

    Args:
        logprobs: "b t", nats, of the learner that is updated; gradients flow into it.
        old_logprobs: "b t", nats, detached here.
        advantages: " b".
        mask: tokens that count, after rejection.
        weights: "b t", importance weights, or None for 1.
        clip_low: distance of the lower edge from 1, in [0, 1].
        clip_high: distance of the upper edge from 1.
        dual_clip: c > 1, or None.
        share: "b t", in (0, 1], the share of each importance ratio that truncation left (`importance.truncated_share`),
            or None for 1.

    Raises:
        ConfigError: a clip out of range.

    >>> mask = torch.ones(1, 1, dtype=torch.bool)
    >>> clipped_surrogate(torch.tensor([[0.0]]), torch.tensor([[-1.0]]), torch.tensor([2.0]), mask).loss
    tensor([[-2.4000]])
    """
    check_clip(clip_low=clip_low, clip_high=clip_high)
    check_above(1.0, dual_clip=dual_clip)
    log_ratio = _log_ratio(logprobs, old_logprobs, mask)
    a = as_float(advantages)[:, None]
    ratio = _ratio(log_ratio, a >= 0 if dual_clip is None else True)
    edges = 1 - clip_low, 1 + clip_high if share is None else (1 + clip_high) / share
    gain = _clipped_gain(ratio, a, *edges)
    if dual_clip is not None:
        gain = torch.where(a < 0, torch.maximum(gain, dual_clip * a), gain)
    return _terms(-gain, mask, weights, log_ratio, ratio, advantages, edges)


def positive_surrogate(
    logprobs: LogProbs,
    old_logprobs: LogProbs,
    advantages: Advantages,
    mask: Mask,
    weights: LogProbs | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    share: LogProbs | None = None,
) -> ObjectiveTerms:
    """Return the clipped loss with the negative samples left out: their loss is 0, their place in the mean stays.

    "Positive GRPO" of QaRL §4.2. Arguments and errors as in `clipped_surrogate`.

    >>> mask = torch.ones(1, 1, dtype=torch.bool)
    >>> float(positive_surrogate(torch.zeros(1, 1), torch.zeros(1, 1), torch.tensor([-2.0]), mask).loss.abs())
    0.0
    """
    bound = 2.0  # of what is left out, which has no gradient whatever it is
    terms = clipped_surrogate(logprobs, old_logprobs, advantages, mask, weights, clip_low, clip_high, bound, share)
    return ObjectiveTerms(masked(advantages[:, None] > 0, terms.loss), terms.metrics)


def gspo(
    logprobs: LogProbs,
    old_logprobs: LogProbs,
    advantages: Advantages,
    mask: Mask,
    weights: LogProbs | None = None,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> ObjectiveTerms:
    """Return the clipped loss on the ratio of the whole sequence, −w·min(s·A, clip(s)·A), s = exp(mean_t log r_t).

    Zheng et al. 2025, as used in QaRL §3.2 (r_seq-prox) with the bounds of its Table 2; reduction "sequence". Each
    token has the gradient s·∇log p of its own log-prob (their GSPO-token), so that its weight acts on it and a token of
    weight 0 gets none; with one weight for the whole sequence this is GSPO.

    Arguments and errors as in `clipped_surrogate`; the mean is over the tokens of `mask`.

    >>> mask = torch.ones(1, 2, dtype=torch.bool)
    >>> gspo(torch.tensor([[0.5, -0.5]]), torch.zeros(1, 2), torch.tensor([2.0]), mask).loss
    tensor([[-2., -2.]])
    """
    check_clip(clip_low=clip_low, clip_high=clip_high)
    log_ratio = _log_ratio(logprobs, old_logprobs, mask)
    a = as_float(advantages)[:, None]
    ratio = _sequence_ratio(logprobs, log_ratio, mask, a >= 0)
    edges = 1 - clip_low, 1 + clip_high
    return _terms(-_clipped_gain(ratio, a, *edges), mask, weights, log_ratio, ratio, advantages, edges)


def tbpo(
    logprobs: LogProbs,
    old_logprobs: LogProbs,
    advantages: Advantages,
    mask: Mask,
    mismatch: LogProbs,
    clip_high: float = 4e-4,
    neg_low: float = 3e-4,
    neg_high: float = 7e-4,
    mismatch_cap: float = 2.0,
) -> ObjectiveTerms:
    """Return the loss of trust-band policy optimization, −w̃·r̃·A on every token of a sequence, token by token as `gspo`.

    QaRL §3.2. r = exp(mean_t log r_t), clipped to [0, 1 + clip_high] where A >= 0 and to [1 − neg_low, 1 + neg_high]
    where A < 0. There is no min(): beyond an edge the sequence has exactly no gradient, whatever its sign.
    w̃ = exp(clip(mean_t d_t, ±log mismatch_cap)): eq. 5 clips w itself to [−log c, log c], which only makes sense for
    its logarithm.

    Args:
        logprobs: "b t", nats.
        old_logprobs: "b t", nats, detached here.
        advantages: " b".
        mask: tokens that count, after rejection; means are over these.
        mismatch: "b t", d = learner_old − sampler, nats.
        clip_high: ε_h, upper edge of positive samples.
        neg_low: δ_l, lower edge of negative samples.
        neg_high: δ_h, upper edge of negative samples.
        mismatch_cap: c > 1 of eq. 5.

    Raises:
        ConfigError: a clip out of range, a cap not above 1.

    >>> mask, zero = torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 2)
    >>> tbpo(zero + 1, zero, torch.tensor([-1.0]), mask, zero).loss
    tensor([[1.0007, 1.0007]])
    """
    check_clip(clip_high=clip_high, neg_low=neg_low, neg_high=neg_high)
    check_above(1.0, mismatch_cap=mismatch_cap)
    log_ratio = _log_ratio(logprobs, old_logprobs, mask)
    a = as_float(advantages)[:, None]
    ratio = _sequence_ratio(logprobs, log_ratio, mask, True)
    low = torch.where(a < 0, 1 - neg_low, torch.zeros_like(a))
    high = torch.where(a < 0, 1 + neg_high, torch.full_like(a, 1 + clip_high))
    cap = math.log(mismatch_cap)
    weight = row_means(mask, as_float(mismatch.detach()))[:, None].clamp(-cap, cap).exp()
    loss = -weight * ratio.clamp(low, high) * a
    return _terms(loss, mask, None, log_ratio, ratio, advantages, (low, high))


def sapo(
    logprobs: LogProbs,
    old_logprobs: LogProbs,
    advantages: Advantages,
    mask: Mask,
    weights: LogProbs | None = None,
    temperature_pos: float = 1.0,
    temperature_neg: float = 1.05,
) -> ObjectiveTerms:
    """Return the softly gated loss −w·f(r)·A with f(r) = (4/τ)·sigmoid(τ (r − 1)).

    Gao et al. 2025, discussed in QaRL Appendix D.4. The gradient is that of r·A times 4 p (1 − p), p = sigmoid(·): 1
    at r = 1, falling off on both sides, faster for a larger τ: `temperature_pos` where A > 0, `temperature_neg`
    elsewhere. The other arguments are those of `clipped_surrogate`.

    Raises:
        ConfigError: a temperature that is not positive.

    >>> mask, zero = torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1)
    >>> sapo(zero, zero, torch.tensor([1.0]), mask).loss
    tensor([[-2.]])
    """
    check_above(0.0, temperature_pos=temperature_pos, temperature_neg=temperature_neg)
    log_ratio = _log_ratio(logprobs, old_logprobs, mask)
    a = as_float(advantages)[:, None]
    ratio = _ratio(log_ratio, True)
    tau = torch.where(a > 0, temperature_pos, torch.full_like(a, temperature_neg))
    gain = torch.sigmoid(tau * (ratio - 1)) * (4 / tau) * a
    return _terms(-gain, mask, weights, log_ratio, ratio, advantages, None)


def cispo(
    logprobs: LogProbs,
    old_logprobs: LogProbs,
    advantages: Advantages,
    mask: Mask,
    weights: LogProbs | None = None,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> ObjectiveTerms:
    """Return −w·sg(clip(r, 1 − clip_low, 1 + clip_high))·A·log π: the weight is clipped, no token's gradient is lost.

    MiniMax-M1's CISPO, one of the losses that peers offer; no lower edge by default and an upper one at r = 5.

    Arguments and errors as in `clipped_surrogate`; a `clip_low` of 1 means no lower edge.

    >>> mask = torch.ones(1, 1, dtype=torch.bool)
    >>> cispo(torch.tensor([[-1.0]]), torch.tensor([[-4.0]]), torch.tensor([1.0]), mask).loss
    tensor([[5.]])
    """
    check_clip(clip_low=clip_low, clip_high=clip_high)
    log_ratio = _log_ratio(logprobs, old_logprobs, mask)
    ratio = log_ratio.detach().exp()
    gain = ratio.clamp(1 - clip_low, 1 + clip_high) * as_float(advantages)[:, None] * masked(mask, as_float(logprobs))
    return _terms(-gain, mask, weights, log_ratio, ratio, advantages, (1 - clip_low, 1 + clip_high))
