"""Rejection by the ratio of learner and sampler as callbacks: by bands, by single tokens, of drifted negatives."""

from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor

from lit_qrl.errors import check_choice
from lit_qrl.functional._checks import check_above, check_band, check_divergence, check_veto
from lit_qrl.functional._statistics import share
from lit_qrl.functional.rejection import Divergence, Over, opsm_keep, ratio_keep, token_veto
from lit_qrl.loop.hooks import RLCallback
from lit_qrl.types import Correction, LossContext


def _rejected(keep: Tensor, metric: str, counts: bool, context: LossContext, tokens: bool = False) -> Correction:
    """Return a rejection, with the share of rejected sequences, or `tokens`, under `correction/<metric>`.

    Where it `counts`, the rejected stay in the loss's denominator: weights of 0 instead of keep = False.
    """
    mask, dropped = (context.mask, ~keep) if tokens else (context.mask.any(dim=1), ~keep.all(dim=1))
    metrics = {f"correction/{metric}": share(mask, dropped, context.all_reduce)}
    if counts:
        return Correction(weights=keep.to(context.log_ratio.dtype), metrics=metrics)
    return Correction(keep=keep, metrics=metrics)


class RatioRejection(RLCallback):
    """Rejects tokens or sequences whose ratio learner_old / sampler is far from 1 (verl's `rollout_rs`).

    It weighs nothing, so it stands beside any weight: token-level importance sampling with sequence-level rejection is
    `TruncatedIS` beside it. It may be listed several times with different `divergence` or `over`; what any of them
    rejects is rejected.

    Args:
        upper: for `k1` the upper bound of the ratio ρ, at least 1; for `k2` and `k3` the largest divergence, in nats.
        lower: for `k1` the lower bound of ρ; null takes 1/upper. verl's bounds are on −log ρ: its "lo_hi" is
            lower = 1/hi, upper = 1/lo.
        divergence: `k1`: ρ itself; `k2`: (log ρ)² / 2; `k3`: ρ − 1 − log ρ.
        over: `token` rejects single tokens; the `mean`, `sum` or `max` over a sequence rejects it as a whole.
        count_rejected: leave what is rejected in the loss's denominator, as the survey's estimator does.
    """

    def __init__(
        self,
        upper: float,
        lower: float | None = None,
        divergence: Divergence = "k1",
        over: Over = "mean",
        count_rejected: bool = False,
    ) -> None:
        name = type(self).__name__
        check_choice(f"divergence of {name}", divergence, ("k1", "k2", "k3"))
        check_choice(f"over of {name}", over, ("token", "mean", "sum", "max"))
        if divergence == "k1":
            check_band(lower, upper, what=f"The band of {name}")
        else:
            check_divergence(lower, upper)
        self.upper, self.lower, self.count_rejected = upper, lower, count_rejected
        self.divergence: Divergence = divergence
        self.over: Over = over
        self.takes_sequence_ratio = over in ("mean", "sum")
        self.metric = f"rejected_{over}_{divergence}"

    @property
    def state_key(self) -> str:
        """What tells one of several in `trainer.callbacks` from the others."""
        return self._generate_state_key(divergence=self.divergence, over=self.over)

    def correct(self, trainer: Trainer, module: Any, context: LossContext) -> Correction:
        d, mask = context.log_ratio, context.mask
        keep = ratio_keep(d, mask, self.lower, self.upper, self.divergence, self.over)
        return _rejected(keep, self.metric, self.count_rejected, context, tokens=self.over == "token")


class GeometricRejection(RatioRejection):
    """Rejects sequences whose ratio per token, e^(mean d), leaves a band (survey, "Geo-RS"): no bias of length.

    Args:
        lower: of the band, on the ratio itself; null takes 1/upper.
        upper: of the band.
        count_rejected: leave rejected sequences in the loss's denominator, as the survey's estimator does.
    """

    def __init__(self, lower: float | None = 0.99, upper: float = 1.01, count_rejected: bool = False) -> None:
        super().__init__(upper, lower, count_rejected=count_rejected)
        self.metric = "geometric_rejected_sequences"


class TokenVeto(RLCallback):
    """Rejects sequences in which the learner gives any token less than a share of the sampler's probability.

    Args:
        threshold: the smallest ratio learner_old / sampler that is let pass.
        count_rejected: leave rejected sequences in the loss's denominator.
    """

    def __init__(self, threshold: float = 1e-4, count_rejected: bool = False) -> None:
        check_veto(threshold)
        self.threshold, self.count_rejected = threshold, count_rejected

    def correct(self, trainer: Trainer, module: Any, context: LossContext) -> Correction:
        keep = token_veto(context.log_ratio, context.mask, self.threshold)
        return _rejected(keep, "vetoed_sequences", self.count_rejected, context)


class OffPolicySequenceMask(RLCallback):
    """Rejects negative sequences that the learner finds much less likely than the sampler did.

    Args:
        delta: the mean of sampler − learner_old, in nats per token, that a sequence with a negative advantage may
            have. There is no default: it must lie above the format's own mismatch (`mismatch/kl_k1`).
        count_rejected: leave rejected sequences in the loss's denominator.
    """

    takes_sequence_ratio = True

    def __init__(self, delta: float, count_rejected: bool = False) -> None:
        check_above(0.0, delta=delta)
        self.delta, self.count_rejected = delta, count_rejected

    def correct(self, trainer: Trainer, module: Any, context: LossContext) -> Correction:
        keep = opsm_keep(context.log_ratio, context.mask, context.advantages, self.delta)
        return _rejected(keep, "off_policy_sequences", self.count_rejected, context)
