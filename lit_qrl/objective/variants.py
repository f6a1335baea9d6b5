"""The objectives that YAML names; their maths is in `lit_qrl.functional.objective`."""

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lit_qrl.errors import ConfigError
from lit_qrl.functional import _checks as checks
from lit_qrl.functional import objective
from lit_qrl.functional.importance import log_ratio, truncated_share
from lit_qrl.functional.penalty import Estimator
from lit_qrl.functional.reduction import Reduction
from lit_qrl.objective.base import Normalization, Objective
from lit_qrl.types import ObjectiveTerms, RolloutBatch

# DAPO's released recipe gives up after ten rounds of generation.
DAPO_MAX_RESAMPLE = 10
# DAPO's cache of 4096 of 20480 tokens, and its largest penalty.
DAPO_OVERLONG = (0.2, 1.0)


def _mismatch(logprobs: Tensor, mask: Tensor, batch: RolloutBatch) -> Tensor:
    """Return d, "b t"; the learner's log-probs are learner_old's where nobody scored these before its only update."""
    learner_old = batch.learner_old_logprobs
    return log_ratio(logprobs if learner_old is None else learner_old, batch.sampler_logprobs, mask)


class _Clipped(Objective):
    """An objective with one clip on either side, of whatever ratio its formula takes."""

    formula: ClassVar[Callable[..., ObjectiveTerms]]

    def __init__(self, clip_low: float, clip_high: float, **kwargs) -> None:
        super().__init__(**kwargs)
        checks.check_clip(clip_low=clip_low, clip_high=clip_high)
        self.clip_low, self.clip_high = clip_low, clip_high

    def surrogate(self, logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, batch: RolloutBatch) -> ObjectiveTerms:
        given = (batch.advantages, mask, batch.weights, self.clip_low, self.clip_high)
        return type(self).formula(logprobs, old_logprobs, *given, **self.options(logprobs, mask, batch))

    def options(self, logprobs: Tensor, mask: Tensor, batch: RolloutBatch) -> dict[str, Any]:
        """Return what else the formula takes."""
        return {}


class GRPO(_Clipped):
    """Group-relative policy optimization (AIS eqs. 4, 19; QaRL §2.1).

    The AIS paper's form has `scale: none`.

    Args:
        clip_low: the ratio is clipped at 1 − clip_low.
        clip_high: and at 1 + clip_high.
        adaptive_clip: C of QuRL's adaptive clipping range, the `upper` of the `TruncatedIS` beside it: where a token's
            learner_old / sampler is C·x, x > 1, its upper edge is (1 + clip_high)·x; null leaves all edges alike.
        **kwargs: see `Objective`.
    """

    formula = staticmethod(objective.clipped_surrogate)

    def __init__(
        self, clip_low: float = 0.2, clip_high: float = 0.2, adaptive_clip: float | None = None, **kwargs
    ) -> None:
        super().__init__(clip_low=clip_low, clip_high=clip_high, **kwargs)
        self.adaptive_clip = adaptive_clip
        if adaptive_clip is None:
            return
        checks.check_band(0.0, adaptive_clip, what="objective.adaptive_clip")
        if self.old_logprobs != "decoupled":
            raise ConfigError(
                "objective.adaptive_clip moves the edges by learner_old / sampler, beside a ratio to learner_old.",
                expected="old_logprobs: decoupled",
                given=self.old_logprobs,
                remedy="Set old_logprobs to decoupled, or leave adaptive_clip out.",
            )

    def options(self, logprobs: Tensor, mask: Tensor, batch: RolloutBatch) -> dict[str, Any]:
        if self.adaptive_clip is None:
            return {}
        d = _mismatch(logprobs.detach(), mask, batch)
        return {"share": truncated_share(d, mask, self.adaptive_clip)}


class Distillation(Objective):
    r"""On-policy distillation: KL(learner‖reference) on the sampler's own completions, and nothing of their rewards.

    $\mathcal L = \mathbb E_{y \sim \pi_{sampler}} \sum_t \mathrm{KL}(\pi(\cdot | x, y_{<t}) \|
    \pi_{ref}(\cdot | x, y_{<t}))$, the reverse KL of GKD (arXiv:2306.13649, λ = 1). Rejections leave tokens out, and
    weights of corrections do not act: they are the surrogate's. The reference is `model.policy.reference`: a larger
    model, or the policy's own folder, whose plain weights then teach a learner that computes in few bits.

    Args:
        kl_coefficient: factor of the KL.
        kl_estimator: `vocabulary` takes the KL over all words; `k3+`, or another, estimates it from the drawn one.
        reduction: see `Objective`.
        **kwargs: see `Objective`.
    """

    def __init__(
        self,
        kl_coefficient: float = 1.0,
        kl_estimator: Estimator | Literal["vocabulary"] = "vocabulary",
        reduction: Reduction = "token",
        **kwargs,
    ) -> None:
        if kl_coefficient == 0:
            raise ConfigError(
                "Distillation learns from the KL alone.", expected="objective.kl_coefficient > 0", given=kl_coefficient
            )
        super().__init__(kl_coefficient=kl_coefficient, kl_estimator=kl_estimator, reduction=reduction, **kwargs)

    def surrogate(self, logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, batch: RolloutBatch) -> ObjectiveTerms:
        return ObjectiveTerms(torch.zeros_like(logprobs))


class DrGRPO(GRPO):
    """GRPO without its two biases: no division by the group's deviation, none by the completion's length.

    Args:
        scale: see `Objective`.
        reduction: see `Objective`.
        **kwargs: see `GRPO`.
    """

    def __init__(self, scale: Normalization = "none", reduction: Reduction = "constant", **kwargs) -> None:
        super().__init__(scale=scale, reduction=reduction, **kwargs)


class DAPO(GRPO):
    """GRPO with a higher upper clip, the mean over tokens, no KL, dynamic sampling and a soft over-long penalty.

    Args:
        clip_high: the ratio is clipped at 1 + clip_high.
        reduction: see `Objective`.
        filter_zero_variance: draw again groups without any difference in reward.
        max_resample: rounds of generation that this may add to an iteration; what is missing then stays missing.
        overlong_penalty: (share of the completion limit, largest penalty), or null.
        **kwargs: see `GRPO`.
    """

    def __init__(
        self,
        clip_high: float = 0.28,
        reduction: Reduction = "token",
        filter_zero_variance: bool = True,
        max_resample: int = DAPO_MAX_RESAMPLE,
        overlong_penalty: tuple[float, float] | None = DAPO_OVERLONG,
        **kwargs,
    ) -> None:
        super().__init__(
            clip_high=clip_high,
            reduction=reduction,
            filter_zero_variance=filter_zero_variance,
            max_resample=max_resample,
            overlong_penalty=overlong_penalty,
            **kwargs,
        )


class DualClipGRPO(GRPO):
    """GRPO whose negative samples are bounded from above too (QaRL §3.2, "Dual-clip GRPO" of §4.2).

    Args:
        dual_clip: where the advantage is negative, the gradient ends at this ratio.
        **kwargs: see `GRPO`.
    """

    def __init__(self, dual_clip: float = 3.0, **kwargs) -> None:
        super().__init__(**kwargs)
        checks.check_above(1.0, dual_clip=dual_clip)
        self.dual_clip = dual_clip

    def options(self, logprobs: Tensor, mask: Tensor, batch: RolloutBatch) -> dict[str, Any]:
        return {**super().options(logprobs, mask, batch), "dual_clip": self.dual_clip}


class PositiveGRPO(GRPO):
    """GRPO on the samples with a positive advantage alone (QaRL §4.2).

    Args:
        **kwargs: see `GRPO`.
    """

    formula = staticmethod(objective.positive_surrogate)


class GSPO(_Clipped):
    """Group sequence policy optimization: one ratio for the whole sequence, the geometric mean of its tokens'.

    Args:
        clip_low: the sequence's ratio is clipped at 1 − clip_low.
        clip_high: and at 1 + clip_high.
        **kwargs: see `Objective`.
    """

    formula = staticmethod(objective.gspo)
    takes_sequence_ratio = True

    def __init__(self, clip_low: float = 3e-4, clip_high: float = 4e-4, **kwargs) -> None:
        super().__init__(clip_low=clip_low, clip_high=clip_high, **kwargs)


class TBPO(Objective):
    """Trust-band policy optimization: sequences outside their band get no gradient at all (QaRL §3.2).

    It corrects the mismatch itself, so it stands beside no correction that carries the ratio.

    Args:
        clip_high: ε_h, band of positive samples: [0, 1 + clip_high].
        neg_low: δ_l, band of negative samples: [1 − neg_low, 1 + neg_high].
        neg_high: δ_h.
        mismatch_cap: c, the mismatch weight lies in [1/c, c].
        **kwargs: see `Objective`.
    """

    carries_ratio = True
    takes_sequence_ratio = True

    def __init__(
        self,
        clip_high: float = 4e-4,
        neg_low: float = 3e-4,
        neg_high: float = 7e-4,
        mismatch_cap: float = 2.0,
        **kwargs,
    ) -> None:
        super().__init__(**kwargs)
        checks.check_clip(clip_high=clip_high, neg_low=neg_low, neg_high=neg_high)
        checks.check_above(1.0, mismatch_cap=mismatch_cap)
        if self.old_logprobs == "bypass":  # a Trainer refuses it of any objective; a loop of one's own does not ask
            raise ConfigError(
                "TBPO carries the mismatch weight; a ratio against the sampler would count the mismatch twice.",
                expected="old_logprobs: decoupled or policy_gradient",
                given="bypass",
                remedy="Set old_logprobs to decoupled.",
            )
        self.clip_high, self.neg_low, self.neg_high, self.mismatch_cap = clip_high, neg_low, neg_high, mismatch_cap

    def surrogate(self, logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, batch: RolloutBatch) -> ObjectiveTerms:
        bands = (self.clip_high, self.neg_low, self.neg_high, self.mismatch_cap)
        terms = objective.tbpo(logprobs, old_logprobs, batch.advantages, mask, _mismatch(logprobs, mask, batch), *bands)
        if batch.weights is not None:
            terms.loss = terms.loss * batch.weights
        return terms


class SAPO(Objective):
    """Soft adaptive policy optimization: a smooth gate instead of a clip (discussed in QaRL Appendix D.4).

    Args:
        temperature_pos: how sharply positive samples are gated.
        temperature_neg: how sharply negative ones are.
        **kwargs: see `Objective`.
    """

    def __init__(self, temperature_pos: float = 1.0, temperature_neg: float = 1.05, **kwargs) -> None:
        super().__init__(**kwargs)
        checks.check_above(0.0, temperature_pos=temperature_pos, temperature_neg=temperature_neg)
        self.temperature_pos, self.temperature_neg = temperature_pos, temperature_neg

    def surrogate(self, logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, batch: RolloutBatch) -> ObjectiveTerms:
        return objective.sapo(
            logprobs, old_logprobs, batch.advantages, mask, batch.weights, self.temperature_pos, self.temperature_neg
        )


class CISPO(_Clipped):
    """Clipped importance-sampling weights on the log-likelihood: no token's gradient is lost.

    Args:
        clip_low: the weight is clipped at 1 − clip_low; 1 means no lower edge.
        clip_high: and at 1 + clip_high.
        reduction: see `Objective`.
        **kwargs: see `Objective`.
    """

    formula = staticmethod(objective.cispo)

    def __init__(self, clip_low: float = 1.0, clip_high: float = 4.0, reduction: Reduction = "token", **kwargs) -> None:
        super().__init__(clip_low=clip_low, clip_high=clip_high, reduction=reduction, **kwargs)
