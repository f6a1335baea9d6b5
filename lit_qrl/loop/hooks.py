"""Where callbacks and the module meet: Lightning's `Callback` with the hooks of reinforcement learning."""

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from itertools import combinations
from typing import TYPE_CHECKING, Literal

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from lit_qrl.errors import ConfigError
from lit_qrl.functional._compile import fused
from lit_qrl.functional._statistics import masked, share
from lit_qrl.rollout.engine import EngineDiedError
from lit_qrl.types import AllReduce, Correction, LossContext, RolloutBatch, no_all_reduce

if TYPE_CHECKING:
    from lit_qrl.module import GRPOModule
    from lit_qrl.objective import Objective


class RLCallback(Callback):
    """Every hook is optional; a run with none of these callbacks is plain GRPO.

    A new estimator overrides `correct`:

    >>> import torch
    >>> class HalfWeight(RLCallback):
    ...     def correct(self, trainer, module, context):
    ...         return Correction(weights=torch.full_like(context.log_ratio, 0.5))
    """

    carries_ratio: bool = False
    """True when the weights hold the ratio learner_old / sampler; two such callbacks would square it."""

    def on_rollout_start(self, trainer: Trainer, module: "GRPOModule", version: int) -> None:
        """Called before the weights of `version` are published."""

    def on_publish(self, trainer: Trainer, module: "GRPOModule", name: str, tensor: Tensor) -> Tensor:
        """Return what the engine should get instead of the learner's clean, not yet quantized `tensor`."""
        return tensor

    def on_rollout_end(self, trainer: Trainer, module: "GRPOModule", batch: RolloutBatch) -> None:
        """Called with the scored rollout of the iteration, before any mini-batch is cut."""

    def on_generation_end(self, trainer: Trainer, module: "GRPOModule") -> None:
        """Called when the last completion of a rollout or an evaluation is drawn, before anything is scored."""

    def on_engine_died(self, trainer: Trainer, module: "GRPOModule", error: EngineDiedError) -> bool:
        """Return True when the engine was built again and holds its weights, so that the same is drawn once more."""
        return False

    def correct(self, trainer: Trainer, module: "GRPOModule", context: LossContext) -> Correction | None:
        """Return weights and rejections for one whole mini-batch; called once per mini-batch."""
        return None


def rl_callbacks(trainer: Trainer) -> Iterator[RLCallback]:
    """Yield the trainer's callbacks that have the hooks of reinforcement learning."""
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(callback, RLCallback):
            yield callback


def overrides(callback: RLCallback, hook: str) -> bool:
    """Return whether a callback implements a hook itself.

    >>> overrides(RLCallback(), "correct")
    False
    """
    return getattr(type(callback), hook) is not getattr(RLCallback, hook)


def trainer_all_reduce(trainer: Trainer) -> AllReduce:
    """Return the `AllReduce` of the trainer's ranks, `no_all_reduce` itself where there is one rank."""
    if trainer.world_size == 1:
        return no_all_reduce

    def all_reduce(value: Tensor, op: Literal["sum", "max", "min"] = "sum") -> Tensor:
        return trainer.strategy.reduce(value, reduce_op=op)  # pyright: ignore[reportReturnType, reportArgumentType]

    return all_reduce


def combine(
    corrections: Sequence[Correction], mask: Tensor, *, all_reduce: AllReduce = no_all_reduce
) -> tuple[Tensor | None, Tensor | None, dict[str, Tensor]]:
    """Return the product of all weights, the conjunction of all keeps, and the metrics of all corrections.

    The same bits come out for any order of the corrections: factors are sorted before they are multiplied. The
    metrics of the result are added: `correction/reweighted_tokens`, `rejected_tokens`, `rejected_sequences` (shares),
    `weight_mean` and `weight_max`.

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
    weights, keep, figures = _combined(mask, factors, keeps, all_reduce=all_reduce)
    metrics.update({f"correction/{name}": value for name, value in figures.items()})
    return weights, keep, metrics


@fused
def _combined(
    mask: Tensor, factors: list[Tensor], keeps: list[Tensor], *, all_reduce: AllReduce
) -> tuple[Tensor | None, Tensor | None, dict[str, Tensor]]:
    figures: dict[str, Tensor] = {}
    if len(factors) > 2:
        factors = list(torch.stack(factors).sort(dim=0).values)
    weights = reduce(torch.mul, factors) if factors else None
    keep = reduce(torch.logical_and, keeps) if keeps else None
    if weights is not None:
        inside = masked(mask, weights)
        reweighted = mask & (weights != 1)
        tokens = torch.stack([mask.sum(), reweighted.sum()]).to(inside.dtype)
        count, reweighted, total = all_reduce(torch.cat([tokens, inside.sum()[None]])).unbind()
        figures["weight_mean"] = total / count.clamp(min=1)
        figures["weight_max"] = all_reduce(inside.amax(), op="max")
        figures["reweighted_tokens"] = reweighted / count.clamp(min=1)
    if keep is not None:
        figures["rejected_tokens"] = share(mask, ~keep, all_reduce)
        figures["rejected_sequences"] = share(mask.any(dim=1), ~(mask & keep).any(dim=1), all_reduce)
    return weights, keep, figures


def check_combination(callbacks: Iterable[Callback], objective: "Objective | None" = None) -> None:
    """Raise `ConfigError` for callbacks that cannot stand beside each other, or beside the objective.

    Args:
        callbacks: all callbacks of the trainer.
        objective: what they correct.
    """
    ours = [callback for callback in callbacks if isinstance(callback, RLCallback)]
    for first, second in combinations(ours, 2):
        if type(first) is type(second):
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
            expected="at most one of AIS, TruncatedIS, MaskedIS and TBPO",
            given=", ".join(carriers),
            remedy="Keep one; rejections (GeometricRejection, TokenVeto, OffPolicySequenceMask) combine with any.",
        )
    if carriers and objective is not None and objective.old_logprobs == "bypass":
        raise ConfigError(
            f"With old_logprobs: bypass the objective's own ratio is learner / sampler, and {carriers[0]} would "
            "multiply by learner_old / sampler once more.",
            expected="old_logprobs: decoupled or policy_gradient",
            given="bypass",
            remedy=f"Change old_logprobs, or remove {carriers[0]}.",
        )
