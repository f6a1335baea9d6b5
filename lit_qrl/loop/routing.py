"""Whose choice of experts the learner's forward passes take, and how far its own routers would go from it.

========= =====================================================================================================
replayed  what the learner's forward passes take
========= =====================================================================================================
nothing   what its own routers choose, in each pass anew
`rollout` what the sampler took when it drew the tokens, in scoring and training: Rollout Routing Replay (R3),
          Ma et al., arXiv:2510.11370
`old`     what learner_old took when it was scored, in the training passes of all updates of the iteration: Routing
          Replay (R2), Zheng et al., arXiv:2507.18071, § 4.4
========= =====================================================================================================

Either way the choice is `RolloutBatch.routed_experts` from then on: the engine fills it in, or `scored_routes`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lit_qrl.functional.diagnostics import router_shift
from lit_qrl.loop.contracts import Learner
from lit_qrl.loop.hooks import rl_callbacks
from lit_qrl.loop.state import IterationMetrics
from lit_qrl.network.balance import balance_coefficient, balance_loss, real_tokens, router_logits
from lit_qrl.network.routing import differing, experts_taken, route_dtype, routers, unrouted
from lit_qrl.types import RolloutBatch


def replayed_level(trainer: Trainer) -> Literal["rollout", "old"] | None:
    """Return whose choice of experts the callbacks want replayed."""
    return next((callback.replays for callback in rl_callbacks(trainer) if callback.replays), None)


def _shift_floor(trainer: Trainer) -> float | None:
    return next((one.shift_floor for one in rl_callbacks(trainer) if one.shift_floor is not None), None)


def scored_routes(learner: Learner, rollout: RolloutBatch) -> tuple[Tensor | None, Tensor | None]:
    """Return "b s layers k" of what learner_old chooses when it is scored, and of what its routers give these experts.

    Either is None where nobody asks for it.
    """
    replays, shifts = replayed_level(learner.trainer) == "old", _shift_floor(learner.trainer) is not None
    if not (replays or shifts):
        return None, None
    found, device = routers(learner.policy.network), rollout.tokens.device
    shape = (*rollout.tokens.shape, len(found), found[0].chosen)
    dtype = route_dtype(max(router.experts for router in found))
    routes = torch.full(shape, unrouted(dtype), dtype=dtype, device=device) if replays else None
    return routes, torch.zeros(shape, device=device) if shifts else None


def shifted(learner: Learner, batch: RolloutBatch, gates: Tensor | None) -> RolloutBatch:
    """Return the batch with learner_old's log-probs less log γ, so that an objective's ratio is rescaled by γ.

    γ is that of the position from which a token is predicted (`functional.diagnostics.router_shift`).

    Args:
        learner: whose callbacks say the floor.
        batch: the sequences.
        gates: "b s layers k", what the routers that are trained give the experts taken, or None.
    """
    floor, before = _shift_floor(learner.trainer), batch.router_logprobs
    if floor is None or before is None or gates is None or batch.learner_old_logprobs is None:
        return batch
    s, t = batch.tokens.shape[1], batch.mask.shape[1]
    predicting = slice(s - t - 1, s - 1)
    ratio = router_shift(gates[:, predicting], before[:, predicting], floor).masked_fill(~batch.mask, 1.0)
    count = batch.mask.sum().float()
    for name, values in (("shift", ratio), ("shift_floored", (ratio <= floor).float())):
        learner.iteration.metrics.add(f"routing/{name}", torch.stack([(values * batch.mask).sum(), count]))
    return replace(batch, learner_old_logprobs=batch.learner_old_logprobs - ratio.log())


def record_difference(metrics: IterationMetrics, own: Tensor, replayed: Tensor, prefix: str = "") -> None:
    """Add what shares of tokens the learner's routers would send elsewhere than the replayed choice does.

    `routing/differing_tokens` in some layer, `routing/differing_choices` of all tokens in all layers, and
    `routing/differing_layer_<i>`; each router is asked after the layers before it took the replayed experts.

    Args:
        metrics: of the iteration.
        own: "b s layers k".
        replayed: "b s layers k".
        prefix: of the metrics' names; such as come from routers that took their own experts before, too.
    """
    absent = unrouted(replayed.dtype)
    known = ((own != absent) & (replayed != absent)).flatten(2).all(dim=2)
    elsewhere = differing(own, replayed) & known[..., None]
    count = known.sum().float()
    by_layer = elsewhere.flatten(0, 1).sum(dim=0).float()
    metrics.add(f"routing/{prefix}differing_tokens", torch.stack([elsewhere.any(dim=2).sum().float(), count]))
    metrics.add(f"routing/{prefix}differing_choices", torch.stack([by_layer.sum(), count * len(by_layer)]))
    for layer, total in enumerate(by_layer):
        metrics.add(f"routing/{prefix}differing_layer_{layer}", torch.stack([total, count]))


@contextmanager
def balanced(learner: Learner) -> Iterator[Callable[[RolloutBatch], Tensor | float]]:
    """Yield what a training pass inside adds to its loss so that experts are taken evenly: 0 where nobody asks for it.

    It is of the tokens of the pass, prompts included, and each pass of a mini-batch counts alike.

    Args:
        learner: whose objective has the factor.
    """
    network = learner.policy.network
    coefficient = balance_coefficient(network, learner.objective.load_balance_coefficient)
    if not coefficient:
        yield lambda batch: 0.0
        return
    with router_logits(network) as seen:

        def loss(batch: RolloutBatch) -> Tensor:
            real = real_tokens(len(seen[0]), batch.total_length, batch.tokens.shape[1])
            value = balance_loss(seen, routers(network)[0].chosen, real)
            learner.iteration.metrics.value("routing/balance_loss", value)
            return value * (coefficient / (learner.data.budget.parts * learner.trainer.world_size))

        yield loss


def load_balance(routes: Tensor, experts: int) -> dict[str, Tensor]:
    """Return how evenly tokens are spread over the experts: means over layers.

    `load_max` is the load of the busiest expert over the mean (1 is even, `experts / k` is collapsed), `load_cv` the
    coefficient of variation of the loads, `unused_experts` the share of experts that no token took.

    Args:
        routes: "… layers k".
        experts: of each layer.

    >>> load_balance(torch.tensor([[[0, 1]], [[0, 2]]], dtype=torch.uint8), 4)["load_max"]
    tensor(2.)
    """
    loads = experts_taken(routes.flatten(0, -3), experts).float()
    mean = loads.mean(dim=1).clamp(min=1e-9)
    return {
        "load_max": (loads.amax(dim=1) / mean).mean(),
        "load_cv": (loads.std(dim=1, correction=0) / mean).mean(),
        "unused_experts": (loads == 0).float().mean(),
    }
