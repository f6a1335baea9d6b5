"""When learner_old is scored, and what callbacks and objective make of its mismatch with the sampler.

The corrections of several callbacks become one: weights multiply, rejections add up, two ratios are refused.
"""

from collections.abc import Iterable, Sequence
from enum import Enum
from functools import reduce
from itertools import combinations

import torch
from lightning.pytorch import Callback
from torch import Tensor

from lit_qrl.errors import ConfigError
from lit_qrl.functional._statistics import masked, share
from lit_qrl.functional.importance import batch_normalized, log_ratio
from lit_qrl.loop.contracts import Learner
from lit_qrl.loop.hooks import RLCallback, overrides, rl_callbacks
from lit_qrl.objective import Objective
from lit_qrl.types import AllReduce, Correction, LossContext, MicroBatch, RolloutBatch, no_all_reduce


class ScoredWhen(Enum):
    """When learner_old's log-probs are known, and so where corrections are taken."""

    BEFORE = "by forward passes of their own, before the first update"
    WHOLE = "by the training forward, which sees all of the only mini-batch"
    PARTS = "by the training forwards of the only mini-batch's parts, each corrected by itself"
    NOWHERE = "nothing asks for them before the update"


def scored_when(learner: Learner) -> ScoredWhen:
    """Return when learner_old is scored.

    With one update per rollout it is the training forward's own log-probs, and `weigh_here` takes them there; what has
    to be known of several micro-batches before the first, or after the learner has moved, is not to be had from that;
    nor is what a training forward with dropout says.
    """
    objective, data, callbacks = learner.objective, learner.data, list(rl_callbacks(learner.trainer))
    corrections = [callback for callback in callbacks if overrides(callback, "correct")]
    several = data.passes * data.mini_batches > 1
    whole = not several and data.budget.whole
    looks_at_all = any(callback.needs == "batch" for callback in corrections)
    shaped = bool(objective.kl_coefficient) and objective.kl_in == "reward"
    if (
        learner.policy.dropout
        or any(callback.needs_learner_old for callback in callbacks)
        or (not whole and (looks_at_all or (corrections and objective.normalize_weights is not None)))
        or (shaped and objective.old_logprobs != "bypass")
        or (several and (objective.old_logprobs == "decoupled" or corrections or objective.carries_ratio))
    ):
        return ScoredWhen.BEFORE
    if not corrections:
        return ScoredWhen.NOWHERE
    return ScoredWhen.WHOLE if whole else ScoredWhen.PARTS


def needs_kept(learner: Learner) -> bool:
    """Return whether the rollout is truncated by `top_p` or `top_k` while something compares learner and sampler.

    The learner's distribution must then be the one over the tokens that the sampler could draw, as the sampler's is.
    """
    sampling = learner.data.sampling
    if not sampling.truncated or sampling.temperature == 0:
        return False
    corrects = any(overrides(callback, "correct") for callback in rl_callbacks(learner.trainer))
    return corrects or learner.objective.carries_ratio


@torch.no_grad()
def correct(learner: Learner, mini_batch: RolloutBatch) -> tuple[Tensor, Tensor]:
    """Set weights and kept tokens of a whole mini-batch, as callbacks and objective say.

    Returns:
        The denominator of its loss, and whether it has anything to learn from, both over all ranks.
    """
    objective = learner.objective
    if mini_batch.learner_old_logprobs is not None:
        metrics = weigh(learner, mini_batch, mini_batch.learner_old_logprobs, learner.reduce)
        learner.iteration.metrics.update(metrics)
        if objective.normalize_weights is not None and mini_batch.weights is not None:
            mini_batch.weights = batch_normalized(
                mini_batch.weights, mini_batch.mask, objective.normalize_weights, all_reduce=learner.reduce
            )
    counted = objective.effective_mask(mini_batch)
    taught = counted.any(dim=1)
    if not objective.penalized:
        taught &= mini_batch.advantages != 0
    has_signal = learner.reduce(taught.sum()) > 0
    return learner.reduce(objective.total(counted, learner.data.max_completion_tokens)), has_signal


@torch.no_grad()
def weigh(
    learner: Learner, batch: RolloutBatch, learner_old: Tensor, all_reduce: AllReduce = no_all_reduce
) -> dict[str, Tensor]:
    """Set the weights and kept tokens of a batch, as the callbacks say, and return their metrics.

    Args:
        learner: whose callbacks correct.
        batch: a whole mini-batch, or any sequences where all corrections need no more than that.
        learner_old: "b t", nats, detached.
        all_reduce: makes what a correction measures global over ranks.
    """
    trainer = learner.trainer
    context = LossContext(
        learner_old=learner_old,
        sampler=batch.sampler_logprobs,
        log_ratio=log_ratio(learner_old, batch.sampler_logprobs, batch.mask),
        mask=batch.mask,
        advantages=batch.advantages,
        version=batch.version,
        versions=batch.versions,
        all_reduce=all_reduce,
    )
    given = (callback.correct(trainer, learner, context) for callback in rl_callbacks(trainer))
    corrections = [correction for correction in given if correction is not None]
    batch.weights, batch.keep, metrics = combine(corrections, batch.mask, all_reduce=all_reduce)
    return metrics


@torch.no_grad()
def weigh_here(learner: Learner, part: MicroBatch, logprobs: Tensor) -> None:
    """Correct a micro-batch by the training forward's log-probs, where learner_old was not scored.

    Raises:
        ValueError: a correction that needs only sequences rejected tokens, which changes the whole batch's denominator.
    """
    batch, how = part.batch, scored_when(learner)
    if batch.learner_old_logprobs is not None:
        return
    if how is ScoredWhen.WHOLE:
        batch.mask = batch.mask & torch.isfinite(logprobs)  # as `Guard` drops what was scored
        batch.learner_old_logprobs = torch.where(batch.mask, logprobs.detach().float(), 0.0)
        part.total, part.has_signal = correct(learner, batch)
        if batch.keep is not None:
            learner.iteration.skip_step = not bool(part.has_signal)
    elif how is ScoredWhen.PARTS:
        weigh(learner, batch, logprobs.detach())
        if batch.keep is not None:
            raise ValueError(
                "A correction rejected tokens when the loss's denominator was known already. Expected: weights alone "
                "from a callback whose needs is 'sequence'. Given: keep. Set its needs to 'batch', or return weights "
                "of 0."
            )


@torch.no_grad()
def close(learner: Learner) -> None:
    """Close the iteration after its last update; what was weighed by parts is measured as a whole."""
    measured = learner.iteration.measured()
    if measured is not None and measured.learner_old_logprobs is not None and scored_when(learner) is ScoredWhen.PARTS:
        learner.iteration.metrics.update(weigh(learner, measured, measured.learner_old_logprobs, learner.reduce))
    learner.data.schedule.measured(learner)
    learner.iteration.close(learner.reduce)


def combine(
    corrections: Sequence[Correction], mask: Tensor, *, all_reduce: AllReduce = no_all_reduce
) -> tuple[Tensor | None, Tensor | None, dict[str, Tensor]]:
    """Return the product of all weights, the conjunction of all keeps, and the metrics of all corrections.

    The same bits come out for any order of the corrections: factors are sorted before they are multiplied. The
    metrics of the result are added: `correction/reweighted_tokens`, `rejected_tokens`, `rejected_sequences` (shares),
    `weight_mean`, `weight_cv` (deviation over mean, ddof = 1; of clipped weights that of AIS Fig. 3) and `weight_max`.

    Args:
        corrections: what the callbacks returned, without the None.
        mask: "b t", tokens that count.
        all_reduce: makes the metrics global over ranks.

    Raises:
        ValueError: weights or keep of another shape than `mask`; the same metric from two corrections.

    >>> half = Correction(weights=torch.full((1, 2), 0.5))
    >>> combine([half, half], torch.ones(1, 2, dtype=torch.bool))[0]
    tensor([[0.2500, 0.2500]])
    """
    metrics: dict[str, Tensor] = {}
    for correction in corrections:
        for name, value in (("weights", correction.weights), ("keep", correction.keep)):
            if value is not None and value.shape != mask.shape:
                raise ValueError(
                    f"A correction returned {name} of the wrong shape. Expected: {tuple(mask.shape)}. "
                    f"Given: {tuple(value.shape)}. Return one value for every completion token."
                )
        for name in metrics.keys() & correction.metrics.keys():
            raise ValueError(f"Two corrections log {name}. Expected: distinct names. Given: it twice. Rename one.")
        metrics.update(correction.metrics)
    factors = [correction.weights.detach() for correction in corrections if correction.weights is not None]
    keeps = [correction.keep for correction in corrections if correction.keep is not None]
    if len(factors) > 2:
        factors = list(torch.stack(factors).sort(dim=0).values)
    weights = reduce(torch.mul, factors) if factors else None
    keep = reduce(torch.logical_and, keeps) if keeps else None
    if weights is not None:
        inside = masked(mask, weights)
        reweighted = mask & (weights != 1)
        tokens = torch.stack([mask.sum(), reweighted.sum()]).to(inside.dtype)
        apart = masked(mask, weights - 1)  # from 1, so that a small deviation does not cancel
        sums = torch.stack([inside.sum(), apart.sum(), apart.square().sum()])
        count, reweighted, total, first, second = all_reduce(torch.cat([tokens, sums])).unbind()
        n = count.clamp(min=1)
        variance = (second / n - (first / n).square()).clamp(min=0) * n / (n - 1).clamp(min=1)
        metrics["correction/weight_mean"] = total / n
        metrics["correction/weight_cv"] = torch.where(total > 0, variance.sqrt() / (total / n), 0.0)
        metrics["correction/weight_max"] = all_reduce(inside.amax(), op="max")
        metrics["correction/reweighted_tokens"] = reweighted / n
    if keep is not None:
        metrics["correction/rejected_tokens"] = share(mask, ~keep, all_reduce)
        metrics["correction/rejected_sequences"] = share(mask.any(dim=1), ~(mask & keep).any(dim=1), all_reduce)
    return weights, keep, metrics


def check_combination(callbacks: Iterable[Callback], objective: Objective | None = None) -> None:
    """Raise `ConfigError` for callbacks that cannot stand beside each other, or beside the objective.

    Args:
        callbacks: all callbacks of the trainer.
        objective: what they correct.
    """
    ours = [callback for callback in callbacks if isinstance(callback, RLCallback)]
    for first, second in combinations(ours, 2):
        if first.state_key == second.state_key:
            raise ConfigError(
                f"trainer.callbacks holds {type(first).__name__} twice.",
                expected="each callback once",
                given=", ".join(type(callback).__name__ for callback in ours),
                remedy="Remove one; a fragment of configs/correction replaces the list, callbacks+ appends to it.",
            )
    carriers = [type(callback).__name__ for callback in ours if callback.carries_ratio]
    if objective is not None and objective.carries_ratio:
        carriers.append(type(objective).__name__)
    if len(carriers) > 1:
        count = "both" if len(carriers) == 2 else "all"
        raise ConfigError(
            f"{' and '.join(carriers)} {count} multiply by the ratio learner_old / sampler, which would raise it to "
            f"the power {len(carriers)}.",
            expected="at most one of AIS, TruncatedIS, MaskedIS, TBPO and what else declares carries_ratio",
            given=", ".join(carriers),
            remedy="Keep one; rejections (RatioRejection, GeometricRejection, TokenVeto, OffPolicySequenceMask) "
            "combine with any.",
        )
    if carriers and objective is not None and objective.old_logprobs == "bypass":
        raise ConfigError(
            f"With old_logprobs: bypass the objective's own ratio is learner / sampler, and {carriers[0]} would "
            "multiply by learner_old / sampler once more.",
            expected="old_logprobs: decoupled or policy_gradient",
            given="bypass",
            remedy=f"Change old_logprobs, or remove {carriers[0]}.",
        )


def check_estimated(callbacks: Iterable[Callback], objective: Objective) -> None:
    """Raise `ConfigError` for what needs autoregressive log-probs, beside a policy whose log-probs are estimates.

    Args:
        callbacks: all callbacks of the trainer.
        objective: what they correct.
    """
    parts: list[RLCallback | Objective] = [one for one in callbacks if isinstance(one, RLCallback)]
    odd = [type(one).__name__ for one in (*parts, objective) if one.takes_sequence_ratio]
    if odd:
        raise ConfigError(
            f"{odd[0]} multiplies the ratios of a sequence's tokens into one of its probabilities, which needs "
            "autoregressive log-probs; those of a masked-diffusion policy are estimated token by token.",
            expected="corrections and objectives that weigh each token by its own ratio",
            given=", ".join(odd),
            remedy="Set level (of AIS, TruncatedIS, MaskedIS) or over (of RatioRejection) to token, take TokenVeto for "
            "GeometricRejection and OffPolicySequenceMask, and GRPO, DAPO, DrGRPO, CISPO or SAPO for GSPO and TBPO.",
        )
