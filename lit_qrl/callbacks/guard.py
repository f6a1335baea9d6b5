"""One declared action and one logged event for everything that can go wrong in an update."""

from collections.abc import Callable
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch import Trainer
from torch.optim import Optimizer

from lit_qrl.errors import ConfigError
from lit_qrl.functional.importance import log_ratio
from lit_qrl.functional.mismatch import mismatch_metrics
from lit_qrl.loop.hooks import RLCallback, rl_callbacks
from lit_qrl.network.shards import whole
from lit_qrl.run.event_log import event, tell
from lit_qrl.run.stop import stop_run
from lit_qrl.types import RolloutBatch

if TYPE_CHECKING:
    from lit_qrl.module import GRPOModule

Action = Literal["warn", "skip", "revert", "stop"]
FIRST_KL, FIRST_ESS = 0.05, 0.8
"""Where the mismatch before any update is far out: above the one, or below the other; see `Guard`."""
FAR_OUT = (
    "The sampler is far from the learner before any update: KL(sampler ‖ learner) {kl:.3g} nats per token and an ESS "
    "ratio of {ess:.2f}, where nvfp4 gives 0.03 and 0.94. Either the format is too coarse for this model (try "
    "publisher.format fp8_row; bf16 shows whether it is the format; lit-qrl audit measures all), or the prompts are "
    "unlike what it was trained on (a template that is not its own, completions past its end token: see "
    "samples.jsonl).{more}"
)
UNCORRECTED = " No correction weighs it: add configs/correction/tis.yaml."


def _overflowed(trainer: Trainer) -> bool:
    """Return whether a gradient that is not finite is a loss scaler's: it tries large scales and halves them."""
    scaler: Any = getattr(trainer.precision_plugin, "scaler", None)
    return scaler is not None and scaler.is_enabled() and scaler.get_scale() > 1


def _held(optimizers: list[Optimizer]) -> Callable[[], None]:
    """Return what gives the trained weights, and what optimizers keep of them, the numbers back that they have now."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    weights = [(one, one.detach().clone()) for group in groups for one in group["params"]]
    states = deepcopy([optimizer.state_dict() for optimizer in optimizers])

    @torch.no_grad()
    def give_back() -> None:
        for weight, before in weights:
            weight.copy_(before)
        for optimizer, state in zip(optimizers, states, strict=True):  # the learning rate goes on
            optimizer.load_state_dict({**state, "param_groups": optimizer.state_dict()["param_groups"]})

    return give_back


class Guard(RLCallback):
    """Keeps a broken number from reaching the weights.

    ========================================== =======================================================================
    condition                                  action
    ========================================== =======================================================================
    non-finite log-prob or ratio of a token    the token leaves the loss and its denominator; past
                                               `max_nonfinite_fraction` of all tokens the run stops
    non-finite gradient                        the optimizer step is vetoed on all ranks; after `patience` in a row
                                               the run stops
    overflow of a scaled loss (`16-mixed`)     the scaler skips the step and halves its scale; counted, no veto
                                               unless the scale is down to 1
    every token rejected; all advantages zero  the step is skipped and counted
    and neither KL nor entropy in the loss
    importance weights above e^20 (no bound)   the tokens leave the loss and its denominator
    ESS ratio under `ess_floor`                `action`: warn, skip the iteration's updates, skip them and revert the
                                               updates before, or stop
    mismatch KL over `kl_ceiling`              the same
    first iteration: KL over 0.05, or ESS      one warning, with likely causes and what to try, whatever corrects it
    ratio under 0.8
    engine died: crash, out of memory, hang    it is built again, its weights are published and verified, and the same
                                               is drawn once more; after `publisher.max_restarts` in a row the run
                                               stops
    ========================================== =======================================================================

    The first iteration's limits are what formats give before any update on real weights of 0.5B: KL and ESS ratio of
    0.0003 and 0.999 in bf16, 0.004 and 0.99 in `fp8_row`, 0.03 and 0.94 in `nvfp4`. `int4_group` without calibration,
    at 0.08 and 0.70, is beyond them, as is a sampler that computes something else than the learner.

    Args:
        max_nonfinite_fraction: share of tokens, in [0, 1].
        patience: vetoed optimizer steps in a row.
        ess_floor: lowest effective-sample-size ratio of the uncorrected weights; None does not look. A limit that is
            set is measured before the update, which takes one more forward pass where nothing else needs it.
        kl_ceiling: highest KL(sampler ‖ learner_old), in nats per token; None does not look.
        action: what follows when `ess_floor` or `kl_ceiling` trips. `revert` takes the weights of the last iteration
            within the limits, and their optimizer state, of which it keeps a copy beside the learner's, and publishes
            these: step 2 of MIPU (arXiv:2606.29526), which accepts weights k + 1 where J(μ) − J(π) ≥ −c for sampler μ
            and learner π. The limits stand for that gap: it is at most max |R| · √(2 KL) of whole sequences (Pinsker),
            and is measured on the very rollout. The first iteration, of a resumed run too, has none to go back to.
        loss_odds: read in configurations of before and not looked at; `examples/evidence_grid` has the odds of a loss.
    """

    def __init__(
        self,
        max_nonfinite_fraction: float = 0.01,
        patience: int = 3,
        ess_floor: float | None = None,
        kl_ceiling: float | None = None,
        action: Action = "warn",
        loss_odds: float | None = None,
    ) -> None:
        if not 0 <= max_nonfinite_fraction <= 1:
            raise ConfigError(
                "guard.max_nonfinite_fraction is a share.", expected="[0, 1]", given=max_nonfinite_fraction
            )
        if patience < 1:
            raise ConfigError("guard.patience is too small.", expected="at least 1", given=patience)
        if ess_floor is not None and not 0 < ess_floor <= 1:
            raise ConfigError("guard.ess_floor is a ratio.", expected="(0, 1]", given=ess_floor)
        if kl_ceiling is not None and kl_ceiling <= 0:
            raise ConfigError("guard.kl_ceiling must be positive.", given=kl_ceiling)
        if action == "revert" and ess_floor is None and kl_ceiling is None:
            raise ConfigError(
                "guard.action: revert has no limit that could trip.",
                expected="guard.kl_ceiling or guard.ess_floor",
                remedy="Set kl_ceiling to several times what a healthy run shows.",
            )
        self.max_nonfinite_fraction, self.patience = max_nonfinite_fraction, patience
        self.ess_floor, self.kl_ceiling, self.action = ess_floor, kl_ceiling, action
        self.needs_learner_old = ess_floor is not None or kl_ceiling is not None
        self.vetoed_in_a_row = 0
        self.vetoed = 0
        self.skipped = 0
        self._skip_iteration = False
        self._accepted: Callable[[], None] | None = None
        """Goes back to the weights of the last iteration within the limits."""

    def on_rollout_end(self, trainer: Trainer, module: "GRPOModule", batch: RolloutBatch) -> None:
        """Drop tokens without a finite log-ratio, then look at the batch as a whole."""
        self._skip_iteration = False
        finite = torch.isfinite(batch.sampler_logprobs)
        if batch.learner_old_logprobs is not None:
            finite &= torch.isfinite(batch.learner_old_logprobs)
        broken = module.reduce((batch.mask & ~finite).sum())
        if int(broken):
            total = int(module.reduce(batch.mask.sum()))
            batch.mask &= finite
            batch.sampler_logprobs.masked_fill_(~finite, 0.0)
            if batch.learner_old_logprobs is not None:
                batch.learner_old_logprobs.masked_fill_(~finite, 0.0)
            share = int(broken) / total
            message = f"{int(broken)} of {total} tokens had a non-finite log-prob and were dropped."
            event(trainer, "nonfinite_logprobs", message, tokens=int(broken), share=share)
            if share > self.max_nonfinite_fraction:
                stop_run(trainer, "nonfinite_logprobs", message)
        module.iteration.metrics.value("guard/nonfinite_tokens", float(broken))
        if self.needs_learner_old:
            self._look(trainer, module, batch)

    def _look(self, trainer: Trainer, module: "GRPOModule", batch: RolloutBatch) -> None:
        assert batch.learner_old_logprobs is not None
        d = log_ratio(batch.learner_old_logprobs, batch.sampler_logprobs, batch.mask)
        metrics = mismatch_metrics(
            batch.sampler_logprobs + d, batch.sampler_logprobs, batch.mask, all_reduce=module.reduce
        )
        ess, kl = float(metrics["ess_ratio"]), float(metrics["kl_k1"])
        tripped = []
        if self.ess_floor is not None and ess < self.ess_floor:
            tripped.append(f"the ESS ratio {ess:.4f} is under guard.ess_floor = {self.ess_floor}")
        if self.kl_ceiling is not None and kl > self.kl_ceiling:
            tripped.append(f"the mismatch KL {kl:.4f} is over guard.kl_ceiling = {self.kl_ceiling}")
        if tripped:
            message = "; ".join(tripped) + "."
            event(trainer, "mismatch", message, action=self.action, ess_ratio=ess, kl=kl)
            self._skip_iteration = self.action in ("skip", "revert")
            if self._accepted is not None:
                self._accepted()
                module.iteration.metrics.value("guard/reverted", 1.0)
            if self.action == "stop":
                stop_run(trainer, "mismatch", message)
        elif self.action == "revert":
            self._accepted = None  # two copies never stand beside each other
            self._accepted = _held(trainer.optimizers)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: "GRPOModule", optimizer: Optimizer) -> None:
        """Veto a step whose gradient is not finite; skip one that has no signal; log the gradient's norm."""
        gradients = [
            parameter.grad
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if not gradients:
            return
        norm = whole(torch.nn.utils.get_total_norm(gradients))
        bad = pl_module.reduce((~torch.isfinite(norm)).to(torch.int32), op="max")
        if self._skip_iteration or pl_module.iteration.skip_step or int(bad):
            optimizer.zero_grad()  # to None: a zero gradient would still move the weights by AdamW's momentum
        if self._skip_iteration or pl_module.iteration.skip_step:
            self.skipped += 1
            pl_module.iteration.metrics.value("guard/skipped_steps", 1.0)
            if pl_module.iteration.skip_step:
                event(trainer, "no_signal", "Every token was rejected or every advantage was zero: step skipped.")
            return
        if int(bad):
            if _overflowed(trainer):
                pl_module.iteration.metrics.value("guard/overflowed_steps", 1.0)
                return
            self.vetoed += 1
            self.vetoed_in_a_row += 1
            message = f"The gradient was not finite: optimizer step vetoed ({self.vetoed_in_a_row} in a row)."
            event(trainer, "nonfinite_gradient", message)
            pl_module.iteration.metrics.value("guard/vetoed_steps", 1.0)
            if self.vetoed_in_a_row >= self.patience:
                stop_run(trainer, "nonfinite_gradient", message)
            return
        self.vetoed_in_a_row = 0
        pl_module.iteration.metrics.value("update/grad_norm", norm)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: "GRPOModule") -> None:
        """Say when an untruncated correction met weights that no batch can carry, and when the beginning is far out."""
        extreme = pl_module.iteration.row.get("correction/extreme_tokens", 0.0)
        if extreme:
            message = (
                f"{extreme:g} tokens of a mini-batch (mean) had an importance weight above e^20 and were rejected."
            )
            event(trainer, "extreme_weights", message, tokens=extreme)
        row = pl_module.iteration.row  # empty at the epoch end that a resumed run repeats
        kl, ess = row.get("mismatch/kl_k3", 0.0), row.get("mismatch/ess_ratio", 1.0)
        if (kl > FIRST_KL or ess < FIRST_ESS) and trainer.current_epoch == 0:
            corrects = pl_module.objective.carries_ratio or any(one.carries_ratio for one in rl_callbacks(trainer))
            message = FAR_OUT.format(kl=kl, ess=ess, more="" if corrects else UNCORRECTED)
            tell(trainer, "mismatch_at_start", message, kl=kl, ess_ratio=ess)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {"vetoed": self.vetoed, "skipped": self.skipped, "vetoed_in_a_row": self.vetoed_in_a_row}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the counts."""
        for name in ("vetoed", "skipped", "vetoed_in_a_row"):
            setattr(self, name, state_dict.get(name, 0))  # an older run may not have counted it
