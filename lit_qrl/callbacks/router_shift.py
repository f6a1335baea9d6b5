"""Updates count less where the routers of a mixture of experts have moved since the rollout was scored."""

from typing import Any

from lightning.pytorch import Trainer

from lit_qrl.errors import ConfigError
from lit_qrl.loop.hooks import RLCallback, rl_callbacks


class RouterShift(RLCallback):
    """Rescales the ratio learner / learner_old of each token by how far the routers have moved from its experts (RSPO).

    The ratio of `diagnostics.router_shift` is 1 in the first update after a rollout and falls in later ones; it
    multiplies the ratio that an objective clips, and has no gradient. It looks at the experts that the tokens took,
    which `RouterReplay` holds for all updates: it stands beside one.

    Args:
        floor: the smallest ratio, in (0, 1].
    """

    needs_learner_old = True

    def __init__(self, floor: float = 0.8) -> None:
        if not 0 < floor <= 1:
            raise ConfigError("floor of RouterShift is the smallest ratio.", expected="a number in (0, 1]", given=floor)
        self.shift_floor = self.floor = floor

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Check what stands beside it, before any weight is loaded."""
        if stage != "fit":
            return
        data, old = pl_module.data, pl_module.objective.old_logprobs
        beside = [type(one).__name__ for one in rl_callbacks(trainer) if one is not self and one.replays]
        if not beside:
            raise ConfigError(
                "RouterShift follows the experts that each token took, and nothing replays them.",
                expected="RouterReplay in trainer.callbacks",
                remedy="Add it (configs/replay/old.yaml), or remove RouterShift.",
            )
        if pl_module.objective.carries_ratio:
            raise ConfigError(
                f"{type(pl_module.objective).__name__} takes learner_old's log-probs for the mismatch with the "
                "sampler, too, which RouterShift would change.",
                expected="an objective whose loss does not hold the ratio learner_old / sampler, such as GRPO or GSPO",
                given=type(pl_module.objective).__name__,
                remedy="Take another, or remove RouterShift.",
            )
        if data.passes * data.mini_batches == 1 or old != "decoupled":
            raise ConfigError(
                "RouterShift rescales the ratio of the learner to learner_old, which is 1 here.",
                expected="data.passes or data.mini_batches above 1, and model.objective.old_logprobs: decoupled",
                given=f"{data.passes}, {data.mini_batches} and {old}",
                remedy="Change them, or remove RouterShift.",
            )
