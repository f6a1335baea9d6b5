"""Replay of the experts that the sampler, or learner_old, took."""

from dataclasses import replace
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer

from lit_qrl.errors import ConfigError, check_choice
from lit_qrl.functional.importance import log_ratio
from lit_qrl.functional.mismatch import k3_divergence
from lit_qrl.loop.hooks import RLCallback
from lit_qrl.loop.routing import load_balance, record_difference
from lit_qrl.network.padding_free import is_padding_free, prompt_tokens_shared
from lit_qrl.network.routing import check_routers, routers
from lit_qrl.network.structure import outline_of
from lit_qrl.rollout.engine import RecordsRoutes
from lit_qrl.types import RolloutBatch


class RouterReplay(RLCallback):
    """Lets the learner's tokens take experts that were chosen before, weighed by the learner's own routers.

    A router that sees slightly other numbers may take other experts, and the log-prob of a token then jumps, however
    small the difference was. With the same experts on both sides what is left of the mismatch is that of arithmetic
    and weights. Gradients go through the weights of the chosen experts; the choice itself has none in any case.

    It is no correction: it stands beside any of them, and changes the log-ratio that they see. A reference model routes
    for itself.

    Args:
        level: `rollout` replays what the sampler took in every forward pass of the learner (R3, arXiv:2510.11370);
            `old` what the learner took when it was scored, in the updates after it (Routing Replay of
            arXiv:2507.18071), which needs several updates for a rollout and nothing of the engine.
        compare_every: iterations between measurements of the mismatch with and without replay, which cost a forward
            pass or two over the rollout each; 0 measures none. For `rollout` alone.
    """

    def __init__(self, level: Literal["rollout", "old"] = "rollout", compare_every: int = 0) -> None:
        check_choice("level of RouterReplay", level, ("rollout", "old"))
        if compare_every < 0 or (compare_every and level == "old"):
            raise ConfigError(
                "compare_every of RouterReplay counts iterations between comparisons of sampler and learner.",
                expected="0 or more with level: rollout, 0 with level: old",
                given=f"{compare_every} with level: {level}",
                remedy="Leave it out.",
            )
        self.level: Literal["rollout", "old"] = level
        self.replays = level
        self.needs_learner_old = level == "old"
        self.compare_every = compare_every

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Check model, engine and number of updates, before any weight is loaded."""
        if stage != "fit":
            return
        name, data = type(self).__name__, pl_module.data
        check_routers(outline_of(pl_module.policy), name)
        if self.level == "old" and data.passes * data.mini_batches == 1:
            raise ConfigError(
                f"{name} with level: old replays in later updates what the learner took before the first, and there is "
                "one update for each rollout.",
                expected="data.passes or data.mini_batches above 1",
                given="1 and 1",
                remedy="Set its level to rollout, or remove it.",
            )
        if self.level == "rollout":
            if not isinstance(data.engine, RecordsRoutes):
                raise ConfigError(
                    f"{name} needs an engine that records which experts each token took.",
                    expected="data.engine: TransformersEngine, or level: old",
                    given=type(data.engine).__name__,
                    remedy="Change the engine, or set the level to old with several updates for a rollout.",
                )
            data.engine.check_routes(name)

    @torch.no_grad()
    def on_rollout_end(self, trainer: Trainer, module: Any, batch: RolloutBatch) -> None:
        """Log what the routes take and how evenly they spread; compare both kinds of scoring where it is due."""
        routes, metrics = batch.routed_experts, module.iteration.metrics
        if routes is None:
            return
        experts = max(router.experts for router in routers(module.policy.network))
        metrics.value("routing/megabytes", routes.numel() * routes.element_size() / 1e6)
        metrics.update({f"routing/{name}": value for name, value in load_balance(routes, experts).items()})
        if is_padding_free(module.policy.network):  # what went two ways is computed twice
            pair = torch.tensor(prompt_tokens_shared(batch), dtype=torch.float)
            metrics.add("routing/shared_prompt_tokens", pair.to(routes.device))
        if not self.compare_every or trainer.current_epoch % self.compare_every:
            return
        chunks, own = module.data.budget.scoring_passes(module, batch), torch.full_like(routes, 0)
        with module.iteration.timed("score"):
            free = module.score(replace(batch, routed_experts=None, router_logprobs=None), chunks, own)
            replayed = batch.learner_old_logprobs
            replayed = module.score(batch, chunks) if replayed is None else replayed
        for name, scored in (("free", free), ("replayed", replayed)):
            d = log_ratio(scored, batch.sampler_logprobs, batch.mask)
            values = torch.stack([k3_divergence(d)[batch.mask].sum(), batch.mask.sum().float()])
            metrics.add(f"routing/{name}_kl_k3", values)
        record_difference(metrics, own, routes, "free_")
