"""Adaptive importance sampling as a callback."""

from typing import Any, Literal

from lightning.pytorch import Trainer

from lit_qrl.errors import check_choice
from lit_qrl.functional._checks import check_ais
from lit_qrl.functional.adaptive import AISGate, ais_gate, ais_oracle, ais_weights
from lit_qrl.functional.importance import log_ratio
from lit_qrl.loop.hooks import RLCallback, trainer_all_reduce
from lit_qrl.types import Correction, LossContext, RolloutBatch


class AIS(RLCallback):
    """Corrects the mismatch as strongly as each mini-batch bears (AIS, eqs. 12–18).

    Weights are 1 + α (min(e^d, clip) − 1). The gate α falls to 0 when the weights are degenerate or the mismatch is
    negligible.

    Args:
        clip: C, the largest weight.
        saturation: δ, the mean |log-ratio| in nats from which the correction is in full force. 0.02 suits FP8; a
            coarser format saturates it. AIS (Appendix F) expects another value there and gives none; 0.2 for
            INT4 was worse (docs/studies/evidence.md).
        tolerance: γ, how much the correction may widen the spread of the weighted advantages before it is damped.
        sensitivity: β, how strongly it is damped then; the paper gives no value.
        eps: ε, keeps the spread of equal advantages from dividing by 0.
        level: whether a weight belongs to a `token` or to a whole `sequence`.
        scope: whether α is measured on each `minibatch` or once on the whole `rollout`.
        oracle: also log Proposition 1's α* = ‖b0‖² / (‖b0‖² + σ1²) of each mini-batch (`ais_oracle`), which α does not
            look at.
    """

    carries_ratio = True

    def __init__(
        self,
        clip: float = 5.0,
        saturation: float = 0.02,
        tolerance: float = 1.2,
        sensitivity: float = 1.0,
        eps: float = 1e-6,
        level: Literal["token", "sequence"] = "token",
        scope: Literal["minibatch", "rollout"] = "minibatch",
        oracle: bool = False,
    ) -> None:
        check_ais(clip, saturation, tolerance, sensitivity, eps, level)
        check_choice("scope of AIS", scope, ("minibatch", "rollout"))
        self.clip, self.saturation, self.tolerance = clip, saturation, tolerance
        self.sensitivity, self.eps = sensitivity, eps
        self.level: Literal["token", "sequence"] = level
        self.takes_sequence_ratio = level == "sequence"
        self.scope: Literal["minibatch", "rollout"] = scope
        self.oracle = oracle
        self.needs_learner_old = scope == "rollout"
        self._of_rollout: AISGate | None = None

    def on_rollout_end(self, trainer: Trainer, module: Any, batch: RolloutBatch) -> None:
        if self.scope == "minibatch":
            return
        assert batch.learner_old_logprobs is not None  # `needs_learner_old`
        d = log_ratio(batch.learner_old_logprobs, batch.sampler_logprobs, batch.mask)
        reduce = trainer_all_reduce(trainer)
        self._of_rollout = ais_gate(d, batch.mask, batch.advantages, all_reduce=reduce, **self._settings)

    def correct(self, trainer: Trainer, module: Any, context: LossContext) -> Correction:
        gate = self._of_rollout
        if self.scope == "minibatch":
            gate = ais_gate(
                context.log_ratio, context.mask, context.advantages, all_reduce=context.all_reduce, **self._settings
            )
        assert gate is not None  # a rollout ends before it is corrected
        weights = ais_weights(context.log_ratio, context.mask, gate.alpha, self.clip, level=self.level)
        metrics = {f"correction/{name}": value for name, value in gate._asdict().items() if name != "truncated"}
        metrics[f"correction/truncated_{self.level}s"] = gate.truncated
        metrics["correction/clipped_cv"] = (1 / gate.ess_ratio - 1).clamp(min=0).sqrt()
        if self.oracle:
            best = ais_oracle(
                context.log_ratio,
                context.mask,
                context.advantages,
                self.clip,
                level=self.level,
                all_reduce=context.all_reduce,
            )
            metrics["correction/oracle_alpha"], metrics["correction/oracle_alpha_exact"] = best
        return Correction(weights=weights, metrics=metrics)

    @property
    def _settings(self) -> dict[str, Any]:
        names = ("clip", "saturation", "tolerance", "sensitivity", "eps", "level")
        return {name: getattr(self, name) for name in names}
