"""How the corrections of several callbacks become one: weights multiply, rejections add up, two ratios are refused."""

from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import combinations

import torch
from lightning.pytorch import Callback
from torch import Tensor

from lit_qrl.errors import ConfigError
from lit_qrl.functional._statistics import masked, share
from lit_qrl.loop.hooks import RLCallback
from lit_qrl.objective import Objective
from lit_qrl.types import AllReduce, Correction, no_all_reduce


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
            expected="at most one of AIS, TruncatedIS, MaskedIS and TBPO",
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
