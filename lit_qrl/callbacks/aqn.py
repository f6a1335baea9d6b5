"""Adaptive quantization noise: the sampler explores with noisy norms, the learner stays clean (QeRL §3.3)."""

from collections.abc import Sequence
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lit_qrl.callbacks.base import RLCallback
from lit_qrl.errors import ConfigError
from lit_qrl.functional.noise import aqn_sigma
from lit_qrl.seeding import derive_seed

if TYPE_CHECKING:
    from lit_qrl.module import GRPOModule

NORMS_BEFORE_PROJECTIONS = ("*.input_layernorm.weight", "*.post_attention_layernorm.weight")


class AQNNoise(RLCallback):
    """Publishes norm weights with additive Gaussian noise, wᵢ + εᵢ with εᵢ ~ N(0, σ²).

    Noise on the weight of the norm before a projection is multiplicative noise on the projection's input channels
    (QeRL eq. 10-12), so q, k, v share one draw and gate, up another. The run is cut into `num_stages` equal stages:
    the first is silent (quantization noise alone), then σ goes from `start` to `end` (eq. 8, with K − 2 where the
    paper prints K − 1 and would miss the end). One draw per publish, from a generator of its own, always on the
    learner's clean weights: noise never accumulates and never reaches the learner.

    Args:
        start: σ of the second stage.
        end: σ of the last stage.
        num_stages: stages of the run, the silent one included.
        schedule: form of the decay between them.
        norms: patterns of the perturbed parameters' names.
        seed: of the noise; by default derived from the run's seed.
    """

    def __init__(
        self,
        start: float = 1e-2,
        end: float = 5e-4,
        num_stages: int = 10,
        schedule: Literal["exponential", "linear", "cosine", "logarithmic"] = "exponential",
        norms: Sequence[str] = NORMS_BEFORE_PROJECTIONS,
        seed: int | None = None,
    ) -> None:
        if not 0 < end <= start:
            raise ConfigError(
                "AQNNoise decays from start to end.", expected="0 < end <= start", given=f"start = {start}, end = {end}"
            )
        if num_stages < 2:
            raise ConfigError("AQNNoise.num_stages counts the silent stage too.", expected=">= 2", given=num_stages)
        self.start, self.end, self.num_stages = start, end, num_stages
        self.schedule: Literal["exponential", "linear", "cosine", "logarithmic"] = schedule
        self.norms, self.seed = tuple(norms), seed
        self.stage, self.sigma, self.perturbed = 0, 0.0, 0
        self._generator = torch.Generator()

    def setup(self, trainer: Trainer, pl_module: "GRPOModule", stage: str) -> None:
        """Check that every stage gets an iteration."""
        if stage == "fit" and trainer.max_epochs is not None and 0 < trainer.max_epochs < self.num_stages:
            raise ConfigError(
                "AQNNoise has more stages than the run has iterations.",
                expected=f"at most trainer.max_epochs = {trainer.max_epochs}",
                given=self.num_stages,
                remedy="Lower num_stages.",
            )

    def on_fit_start(self, trainer: Trainer, pl_module: "GRPOModule") -> None:
        """Check that the patterns match norms of this model."""
        names = [name for name, _ in pl_module.policy.network.named_parameters()]
        if not any(self._matches(name) for name in names):
            norms = sorted({name.rsplit(".", 2)[-2] for name in names if "norm" in name})
            raise ConfigError(
                "AQNNoise matches no parameter of this model.",
                expected=f"patterns for its norms ({', '.join(norms) or 'it has none'})",
                given=", ".join(self.norms),
                remedy="Set norms of AQNNoise.",
            )

    def on_rollout_start(self, trainer: Trainer, module: "GRPOModule", version: int) -> None:
        """Choose σ from the iteration and seed this publish's draw."""
        iterations = max(trainer.max_epochs or 1, 1)
        length = max(iterations // self.num_stages, 1)
        self.stage = min(trainer.current_epoch // length, self.num_stages - 1)
        self.sigma = aqn_sigma(self.stage, self.num_stages, self.start, self.end, self.schedule)
        seed = module.data.base_seed if self.seed is None else self.seed
        self._generator.manual_seed(derive_seed(seed, "aqn", trainer.current_epoch))
        self.perturbed = 0

    def on_publish(self, trainer: Trainer, module: "GRPOModule", name: str, tensor: Tensor) -> Tensor:
        """Return the noisy norm; any other tensor as it is."""
        if self.sigma == 0 or not self._matches(name):
            return tensor
        self.perturbed += 1
        noise = torch.randn(tensor.shape, generator=self._generator, dtype=torch.float32) * self.sigma
        return (tensor.float() + noise.to(tensor.device)).to(tensor.dtype)

    def on_rollout_end(self, trainer: Trainer, module: "GRPOModule", batch: Any) -> None:
        """Log what was done."""
        module.iteration.update({"noise/sigma": self.sigma, "noise/perturbed_norms": float(self.perturbed)})

    def _matches(self, name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in self.norms)

    def state_dict(self) -> dict[str, Any]:
        """Return stage and σ; the draw itself depends on seed and iteration alone."""
        return {"stage": self.stage, "sigma": self.sigma}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore them."""
        self.stage, self.sigma = state_dict["stage"], state_dict["sigma"]
