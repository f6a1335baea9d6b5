"""When learner_old is scored, and what callbacks and objective make of its mismatch with the sampler."""

from typing import Any

import torch
from torch import Tensor

from lit_qrl.functional.importance import batch_normalized, log_ratio
from lit_qrl.loop.combine import combine
from lit_qrl.loop.hooks import Learner, corrected, overrides, rl_callbacks
from lit_qrl.types import AllReduce, LossContext, MicroBatch, RolloutBatch, no_all_reduce


def is_one_pass(learner: Learner) -> bool:
    """Return whether an iteration is one update of one micro-batch, whose forward pass sees all that there is."""
    data = learner.data
    return data.budget is None and data.passes * data.mini_batches * data.parts == 1


def needs_learner_old(learner: Learner) -> bool:
    """Return whether learner_old must be scored on its own, before the update.

    With one update per rollout it is the training forward's own log-probs, and `weigh_here` takes them there; what has
    to be known of several micro-batches before the first, or after the learner has moved, is not to be had from that;
    nor is what a training forward with dropout says.
    """
    objective: Any = learner.objective
    callbacks = list(rl_callbacks(learner.trainer))
    corrections = [callback for callback in callbacks if overrides(callback, "correct")]
    if learner.policy.dropout or any(callback.needs_learner_old for callback in callbacks):
        return True
    of_whole = any(callback.needs == "batch" for callback in corrections)
    if (of_whole or (corrections and objective.normalize_weights is not None)) and not is_one_pass(learner):
        return True
    if objective.kl_coefficient and objective.kl_in == "reward" and objective.old_logprobs != "bypass":
        return True
    several = learner.data.passes * learner.data.mini_batches > 1
    return several and (objective.old_logprobs == "decoupled" or bool(corrections) or objective.carries_ratio)


def needs_kept(learner: Learner) -> bool:
    """Return whether the rollout is truncated by `top_p` or `top_k` while something compares learner and sampler.

    The learner's distribution must then be the one over the tokens that the sampler could draw, as the sampler's is.
    """
    sampling = learner.data.sampling
    if not sampling.truncated or sampling.temperature == 0:
        return False
    return corrected(learner.trainer) or learner.objective.carries_ratio


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
    batch = part.batch
    if batch.learner_old_logprobs is not None or not corrected(learner.trainer):
        return
    if is_one_pass(learner):
        batch.mask = batch.mask & torch.isfinite(logprobs)  # as `Guard` drops what was scored
        batch.learner_old_logprobs = torch.where(batch.mask, logprobs.detach().float(), 0.0)
        part.total, part.has_signal = correct(learner, batch)
        if batch.keep is not None:
            learner.iteration.skip_step = not bool(part.has_signal)
        return
    weigh(learner, batch, logprobs.detach())
    if batch.keep is not None:
        raise ValueError(
            "A correction rejected tokens when the loss's denominator was known already. Expected: weights alone from "
            "a callback whose needs is 'sequence'. Given: keep. Set its needs to 'batch', or return weights of 0."
        )


@torch.no_grad()
def close(learner: Learner) -> None:
    """Close the iteration after its last update; what was weighed by parts is measured as a whole."""
    state = learner.iteration
    measured = state.measured()
    old = None if measured is None or measured is state.rollout else measured.learner_old_logprobs
    if measured is not None and old is not None and corrected(learner.trainer) and not is_one_pass(learner):
        state.metrics.update(weigh(learner, measured, old, learner.reduce))
    if learner.data.ahead is not None:
        learner.data.ahead.tell_staleness(learner)
    state.close(learner.reduce)
