"""What every objective shares: advantages, penalties, reduction, and the one method that a new one implements."""

from abc import ABC, abstractmethod
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from lit_qrl.errors import ConfigError, check_choice
from lit_qrl.functional import _checks as checks
from lit_qrl.functional import advantage
from lit_qrl.functional.advantage import Baseline, Scale
from lit_qrl.functional.penalty import Estimator, kl_penalty
from lit_qrl.functional.reduction import Reduction, count, reduce
from lit_qrl.run.description import Described
from lit_qrl.types import AllReduce, ObjectiveTerms, RolloutBatch, no_all_reduce

OldLogprobs = Literal["decoupled", "bypass", "policy_gradient"]
Normalization = Literal[Scale, "whiten"]


class Objective(Described, ABC):
    """The loss of one update: advantages, surrogate, penalties, reduction.

    A subclass implements `surrogate`, and calls `super().__init__` with defaults of its own.

    Args:
        scale: what divides the centred rewards: the standard deviation of the `group`, of the `batch`, or `none`.
            `whiten` gives them mean 0 and variance 1 over the tokens of the rollout (REINFORCE++).
        reduction: `sequence` is the mean over sequences of their token means, `token` the mean over all tokens,
            `constant` divides by the completion limit; `sequence_sum` is the mean over sequences of their sums,
            `token_sum` the sum over all tokens of the mini-batch.
        baseline: what centres the rewards: the mean of the `group`, that of its other completions (`leave_one_out`:
            RLOO), or `none`.
        old_logprobs: denominator of the ratio. `decoupled`: learner_old, scored in a forward pass of its own where a
            rollout is for several updates; with one update it is the training forward itself. `bypass`: the sampler's
            own log-probs. `policy_gradient`: the current learner: the ratio is 1, nothing is clipped, and only the
            corrections' weights act.
        kl_coefficient: factor of the KL to the reference policy (`model.policy.reference`); 0 means that none is kept.
        kl_estimator: how the KL is estimated from drawn tokens: `k1`, `k2`, `k3`, or `k3+`, which corrects the gradient
            of k3; `vocabulary` computes it exactly, for one forward pass of the reference beside each of the learner's.
            null is `k3+` in the loss and `k1` in the reward, the two whose gradient is that of the KL.
        kl_in: `loss` adds the KL to the loss of each token, `reward` subtracts it from the completion's reward.
        kl_input_clamp: largest |log p − log p_reference| of a token in it, in nats; null does not clamp.
        kl_output_clamp: largest estimate of a token, in nats; null does not clamp.
        entropy_coefficient: factor of the entropy, subtracted from the loss.
        load_balance_coefficient: factor of the auxiliary loss that evens out the load of a mixture's experts; null is
            the one in the model's config (`router_aux_loss_coef`).
        normalize_weights: divide the product of all corrections' weights by its mean over `token`s or `sequence`s.
        filter_zero_variance: replace groups whose completions all got the same reward by new ones (dynamic sampling).
        max_resample: most further rounds of generation for it.
        overlong_penalty: (share of the completion limit, largest penalty): completions that end in that last share
            of the limit lose a linearly growing part of the largest penalty; none if null.
        mask_truncated: leave completions that reached the limit out of the loss, as if rejected; their rewards still
            count in the baseline.
    """

    carries_ratio: ClassVar[bool] = False
    """True when the loss itself holds the ratio learner_old / sampler."""
    takes_sequence_ratio: ClassVar[bool] = False
    """True when it takes the product of a sequence's ratios, or their mean, for the ratio of its probabilities: so it
    is for autoregressive log-probs, not for the estimates of masked diffusion."""

    def __init__(
        self,
        scale: Normalization = "group",
        reduction: Reduction = "sequence",
        baseline: Baseline = "group",
        old_logprobs: OldLogprobs = "decoupled",
        kl_coefficient: float = 0.0,
        kl_estimator: Estimator | Literal["vocabulary"] | None = None,
        kl_in: Literal["loss", "reward"] = "loss",
        kl_input_clamp: float | None = None,
        kl_output_clamp: float | None = None,
        entropy_coefficient: float = 0.0,
        load_balance_coefficient: float | None = 0.0,
        normalize_weights: Literal["token", "sequence"] | None = None,
        filter_zero_variance: bool = False,
        max_resample: int = 0,
        overlong_penalty: tuple[float, float] | None = None,
        mask_truncated: bool = False,
    ) -> None:
        check_choice("objective.scale", scale, get_args(Normalization))
        check_choice("objective.baseline", baseline, get_args(Baseline))
        check_choice("objective.old_logprobs", old_logprobs, get_args(OldLogprobs))
        check_choice("objective.kl_estimator", kl_estimator, (None, "k1", "k2", "k3", "k3+", "vocabulary"))
        check_choice("objective.kl_in", kl_in, ("loss", "reward"))
        if kl_in == "reward" and kl_estimator in ("k3+", "vocabulary"):
            raise ConfigError(
                f"{kl_estimator} is made for the KL's gradient, and the KL in the reward has none.",
                expected=f"kl_in: loss with {kl_estimator}, or kl_estimator k1, k2 or k3",
                given=f"kl_in: reward, kl_estimator: {kl_estimator}",
                remedy="Set kl_estimator to k1, whose expected gradient in the reward is the KL's.",
            )
        clamps = {"objective.kl_input_clamp": kl_input_clamp, "objective.kl_output_clamp": kl_output_clamp}
        checks.check_above(0.0, **clamps)
        check_choice("objective.normalize_weights", normalize_weights, (None, "token", "sequence"))
        check_choice("objective.reduction", reduction, get_args(Reduction))
        for name, value in (
            ("kl_coefficient", kl_coefficient),
            ("entropy_coefficient", entropy_coefficient),
            ("load_balance_coefficient", load_balance_coefficient or 0.0),
            ("max_resample", max_resample),
        ):
            if not value >= 0:
                raise ConfigError(
                    f"objective.{name} is negative.", expected=f"{name} >= 0", given=value, remedy="Correct its sign."
                )
        if overlong_penalty is not None and not (0 < overlong_penalty[0] <= 1 and overlong_penalty[1] >= 0):
            raise ConfigError(
                "objective.overlong_penalty is out of range.",
                expected="[share of the completion limit in (0, 1], largest penalty >= 0]",
                given=list(overlong_penalty),
                remedy="DAPO uses [0.2, 1.0].",
            )
        self.scale: Normalization = scale
        self.baseline: Baseline = baseline
        self.reduction: Reduction = reduction
        self.old_logprobs: OldLogprobs = old_logprobs
        self.kl_coefficient = kl_coefficient
        self.kl_estimator: Estimator | Literal["vocabulary"] = kl_estimator or ("k3+" if kl_in == "loss" else "k1")
        self.kl_in: Literal["loss", "reward"] = kl_in
        self.kl_input_clamp, self.kl_output_clamp = kl_input_clamp, kl_output_clamp
        self.entropy_coefficient, self.load_balance_coefficient = entropy_coefficient, load_balance_coefficient
        self.normalize_weights: Literal["token", "sequence"] | None = normalize_weights
        self.filter_zero_variance = filter_zero_variance
        self.max_resample = max_resample
        self.overlong_penalty, self.mask_truncated = overlong_penalty, mask_truncated

    @property
    def penalized(self) -> bool:
        """True when the loss has a gradient of its own, of KL or entropy, where every advantage is zero."""
        return self.entropy_coefficient > 0 or (self.kl_coefficient > 0 and self.kl_in == "loss")

    @property
    def diverges(self) -> bool:
        """True when the loss takes the KL over the whole vocabulary, which a forward pass must give it."""
        return self.kl_coefficient > 0 and self.kl_estimator == "vocabulary"

    @abstractmethod
    def surrogate(self, logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, batch: RolloutBatch) -> ObjectiveTerms:
        """Return the loss of every token, times `batch.weights`.

        Args:
            logprobs: "b t", nats, with gradient.
            old_logprobs: "b t", nats, as `old_logprobs` chose them.
            mask: "b t", tokens that count, after rejection.
            batch: the micro-batch: advantages, weights, and whatever else the loss needs.
        """

    def shaped_rewards(self, batch: RolloutBatch, completion_limit: int) -> Tensor:
        """Return the rewards, " b", after the soft over-long penalty and, if it belongs there, the KL."""
        rewards = batch.rewards
        if self.overlong_penalty is not None:
            share, factor = self.overlong_penalty
            cache = min(max(round(share * completion_limit), 1), completion_limit)
            rewards = rewards + advantage.overlong_penalty(batch.completion_length, completion_limit, cache, factor)
        if self.kl_coefficient and self.kl_in == "reward":
            logprobs = batch.learner_old_logprobs
            penalty = self._kl(batch.sampler_logprobs if logprobs is None else logprobs, batch, batch.mask)
            rewards = rewards - self.kl_coefficient * penalty.sum(dim=1)
        return rewards

    def advantages(self, rewards: Tensor, group_size: int, all_reduce: AllReduce = no_all_reduce) -> Tensor:
        """Return the advantages, " b", of whole groups of rewards, before they are whitened."""
        scale: Scale = "none" if self.scale == "whiten" else self.scale
        return advantage.group_advantages(rewards, group_size, scale, baseline=self.baseline, all_reduce=all_reduce)

    def rollout_advantages(
        self, batch: RolloutBatch, group_size: int, completion_limit: int, all_reduce: AllReduce = no_all_reduce
    ) -> Tensor:
        """Return the advantages, " b", of a whole rollout: of its shaped rewards, whitened where the scale says so."""
        advantages = self.advantages(self.shaped_rewards(batch, completion_limit), group_size, all_reduce)
        advantages = torch.where(batch.rewards.isnan(), 0.0, advantages)  # of samples that no reward scored
        if self.scale == "whiten":
            return advantage.whitened(advantages, batch.completion_length, all_reduce=all_reduce)
        return advantages

    def terms(
        self,
        logprobs: Tensor,
        batch: RolloutBatch,
        entropy: Tensor | None = None,
        divergence: Tensor | None = None,
    ) -> ObjectiveTerms:
        """Return the loss of every token of a micro-batch, "b t", and metrics as vectors (sum, count).

        Args:
            logprobs: "b t", nats, of the current learner, with gradient.
            batch: the micro-batch, with the corrections' weights and keep.
            entropy: "b t", nats, of the current learner; needed when `entropy_coefficient` is not 0.
            divergence: "b t", nats, KL(learner‖reference) over the vocabulary; needed where it `diverges`.
        """
        mask = self.effective_mask(batch)
        terms = self.surrogate(logprobs, self._old(logprobs, batch), mask, batch)
        if self.kl_coefficient and self.kl_in == "loss":
            penalty = self._kl(logprobs, batch, mask) if divergence is None else torch.where(mask, divergence, 0.0)
            terms.loss = terms.loss + self.kl_coefficient * penalty
            terms.metrics["update/reference_kl"] = torch.stack([penalty.detach().sum(), mask.sum().to(penalty.dtype)])
        if self.entropy_coefficient:
            if entropy is None:
                raise ValueError("The entropy bonus needs the entropy. Expected: a tensor. Given: None. Pass entropy.")
            terms.loss = terms.loss - self.entropy_coefficient * torch.where(mask, entropy, 0.0)
        return terms

    def loss(self, terms_loss: Tensor, batch: RolloutBatch, total: Tensor) -> Tensor:
        """Return the scalar loss of a micro-batch; over the micro-batches these add up to the mini-batch's.

        Args:
            terms_loss: "b t", from `terms`.
            batch: the micro-batch.
            total: 0-dim, `total` of the whole mini-batch, summed over ranks.
        """
        mask = self.effective_mask(batch)
        # `total` holds the completion limit already.
        return reduce(terms_loss, mask, self.reduction, length=1, total=total.to(terms_loss.dtype))

    def total(self, mask: Tensor, completion_limit: int) -> Tensor:
        """Return the loss's denominator, 0-dim, of these sequences on this rank; the caller sums it over ranks.

        Args:
            mask: "b t", tokens that count, after rejection.
            completion_limit: in tokens.
        """
        total = count(mask, self.reduction)
        return total * completion_limit if self.reduction == "constant" else total

    def effective_mask(self, batch: RolloutBatch) -> Tensor:
        """Return the tokens that count after rejection, "b t"."""
        mask = batch.mask if batch.keep is None else batch.mask & batch.keep
        return mask & batch.stopped[:, None] if self.mask_truncated else mask

    def _old(self, logprobs: Tensor, batch: RolloutBatch) -> Tensor:
        if self.old_logprobs == "bypass":
            return batch.sampler_logprobs
        if self.old_logprobs == "policy_gradient" or batch.learner_old_logprobs is None:
            return logprobs.detach()
        return batch.learner_old_logprobs

    def _kl(self, logprobs: Tensor, batch: RolloutBatch, mask: Tensor) -> Tensor:
        if batch.reference_logprobs is None:
            raise ValueError(
                f"The KL to the reference policy (kl_coefficient {self.kl_coefficient}) has no reference. Expected: "
                "reference_logprobs in the batch. Given: None. Score the batch with the reference policy first."
            )
        given = (logprobs, batch.reference_logprobs, self._old(logprobs, batch))
        learner, reference, old = (torch.where(mask, values, 0.0) for values in given)
        clamps = (self.kl_input_clamp, self.kl_output_clamp)
        return kl_penalty(learner, reference, self.kl_estimator, old, *clamps)  # pyright: ignore[reportArgumentType]
