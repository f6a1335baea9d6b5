"""Adaptive quantization noise: the sampler explores with noisy norms, the learner stays clean (QeRL §3.3)."""

import logging
import math
from collections.abc import Sequence
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lit_qrl.errors import ConfigError, check_choice
from lit_qrl.functional.noise import aqn_sigma
from lit_qrl.loop.hooks import RLCallback
from lit_qrl.network.names import base_of, checkpoint_modules
from lit_qrl.network.structure import outline_of
from lit_qrl.network.wiring import norms_before_projections
from lit_qrl.seeding import derive_seed
from lit_qrl.strategies import ShardedStrategy

if TYPE_CHECKING:
    from lit_qrl.module import GRPOModule

log = logging.getLogger(__name__)

Schedule = Literal["exponential", "linear", "cosine", "logarithmic"]


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
        num_stages: stages of the run, the silent one included; a run of fewer iterations has as many as these.
        schedule: form of the decay between them.
        norms: patterns of the perturbed parameters' names; None takes the norms that linear layers read, which are
            found by running the model once, whatever they are called.
        seed: of the noise; by default derived from the run's seed.
        entropy_sequences: of so many sequences of each rollout the entropies of the noisy policy, which drew them, and
            of the clean one are logged (QeRL Figs. 5 and 14), for a forward pass of the learner each; 0 logs none.
            What a format rounds off is in neither, unless the learner holds it too (`NVFP4LoRA`, `QATAligned`).

    Logged are σ, what of it is realized after rounding to the norms' dtype, and the share of their weights that moved.
    """

    def __init__(
        self,
        start: float = 1e-2,
        end: float = 5e-4,
        num_stages: int = 10,
        schedule: Schedule = "exponential",
        norms: Sequence[str] | None = None,
        seed: int | None = None,
        entropy_sequences: int = 0,
    ) -> None:
        for name, sigma in (("start", start), ("end", end)):
            if not (math.isfinite(sigma) and sigma > 0):
                raise ConfigError(
                    f"AQNNoise.{name} is a standard deviation.",
                    expected="a positive number, such as 1e-2",
                    given=sigma,
                    remedy="Leave AQNNoise out for a run without noise.",
                )
        if end > start:
            raise ConfigError(
                "AQNNoise decays from start to end, and end is larger.",
                expected="end <= start",
                given=f"start = {start}, end = {end}",
                remedy="Exchange them.",
            )
        check_choice("AQNNoise.schedule", schedule, get_args(Schedule))
        if num_stages < 2:
            raise ConfigError("AQNNoise.num_stages counts the silent stage too.", expected=">= 2", given=num_stages)
        if entropy_sequences < 0:
            raise ConfigError("AQNNoise.entropy_sequences counts them.", expected=">= 0", given=entropy_sequences)
        self.start, self.end, self.num_stages = start, end, num_stages
        self.entropy_sequences = entropy_sequences
        self.schedule: Schedule = schedule
        self.norms, self.seed = None if norms is None else tuple(norms), seed
        self._chosen: frozenset[str] = frozenset()
        self.stage, self.sigma, self.perturbed = 0, 0.0, 0
        self._sent: dict[str, Tensor] = {}
        self._moves: list[Tensor] = []
        self._generator = torch.Generator()

    def setup(self, trainer: Trainer, pl_module: "GRPOModule", stage: str) -> None:
        """Check that the run has a length, and say where it is shorter than the stages."""
        if stage != "fit":
            return
        epochs = trainer.max_epochs
        if epochs is None or epochs < 0:
            raise ConfigError(
                "AQNNoise cuts the run into stages, and the run has no length.",
                expected="a positive trainer.max_epochs, the number of iterations",
                given=epochs,
            )
        if self.entropy_sequences and isinstance(trainer.strategy, ShardedStrategy):
            raise ConfigError(
                "AQNNoise.entropy_sequences puts noisy norms into the learner, of which each process holds a part.",
                expected="0 under ShardedStrategy",
                given=self.entropy_sequences,
            )
        if self._stages(trainer) < self.num_stages:
            log.info("AQNNoise has %d stages: one for each iteration of the run.", self._stages(trainer))
        if self.norms is not None:
            self._check_norms(outline_of(pl_module.policy))

    def on_fit_start(self, trainer: Trainer, pl_module: "GRPOModule") -> None:
        """Find the norms where none are named; the model has to be run for it."""
        network = pl_module.policy.network
        if self.norms is not None:
            return
        with trainer.precision_plugin.forward_context():
            self._chosen = frozenset(norms_before_projections(network))
        if not self._chosen:
            raise ConfigError(
                "AQNNoise perturbs norms that linear layers read, and this model has none: its norms stand behind "
                "attention and MLP.",
                expected="a model with norms before its projections, such as Qwen's or Llama's",
                given=type(network).__name__,
                remedy="Set norms of AQNNoise to the patterns of others, or leave AQNNoise out.",
            )

    def _check_norms(self, network: Any) -> None:
        """Check that each pattern matches norms of a model, whose weights need not be there, and nothing else."""
        shapes = {name: parameter.dim() for name, parameter in network.named_parameters()}
        norms = sorted({name.rsplit(".", 2)[-2] for name in shapes if "norm" in name})
        for pattern in self.norms or ("",):
            matched = [name for name in shapes if fnmatch(name, pattern)]
            other = [name for name in matched if shapes[name] != 1 or name.endswith(".bias")]
            if not matched or other:
                raise ConfigError(
                    f"AQNNoise.norms matches {other[0]}, which is no norm's weight."
                    if other
                    else "AQNNoise matches no parameter of this model.",
                    expected=f"patterns for its norms ({', '.join(norms) or 'it has none'})",
                    given=pattern or "no pattern",
                    remedy="Set norms of AQNNoise.",
                )

    def on_rollout_start(self, trainer: Trainer, module: "GRPOModule", version: int) -> None:
        """Choose σ from the iteration and seed this publish's draw."""
        iterations, stages = max(trainer.max_epochs or 1, 1), self._stages(trainer)
        length = max(iterations // stages, 1)
        self.stage = min(trainer.current_epoch // length, stages - 1)
        self.sigma = aqn_sigma(self.stage, stages, self.start, self.end, self.schedule)
        seed = module.data.base_seed if self.seed is None else self.seed
        self._generator.manual_seed(derive_seed(seed, "aqn", trainer.current_epoch))
        self.perturbed, self._sent, self._moves = 0, {}, []

    def _stages(self, trainer: Trainer) -> int:
        """Return how many stages the run has: every one has an iteration at least."""
        return max(min(self.num_stages, trainer.max_epochs or 1), 2)

    def on_publish(self, trainer: Trainer, module: "GRPOModule", name: str, tensor: Tensor) -> Tensor:
        """Return the noisy norm; any other tensor as it is."""
        if self.sigma == 0 or not self._matches(name):
            return tensor
        self.perturbed += 1
        noise = torch.randn(tensor.shape, generator=self._generator, dtype=torch.float32) * self.sigma
        noisy = (tensor.float() + noise.to(tensor.device)).to(tensor.dtype)
        moved = noisy.float() - tensor.float()
        self._moves.append(torch.stack([moved.square().sum(), (moved != 0).sum(), moved.new_tensor(moved.numel())]))
        if self.entropy_sequences:
            self._sent[name] = noisy
        return noisy

    def on_rollout_end(self, trainer: Trainer, module: "GRPOModule", batch: Any) -> None:
        """Log what was done."""
        metrics = module.iteration.metrics
        metrics.update({"noise/sigma": self.sigma, "noise/perturbed_norms": float(self.perturbed)})
        if self._moves:
            squares, moved, count = torch.stack(self._moves).sum(dim=0).unbind()
            metrics.update({"noise/realized_sigma": (squares / count).sqrt(), "noise/moved_weights": moved / count})
        if self.entropy_sequences:
            rows = torch.arange(min(self.entropy_sequences, len(batch)), device=batch.mask.device)
            part = batch.select(rows).to(module.device)
            for name, noise in (("learner", {}), ("sampler", self._sent)):
                metrics.values(f"noise/{name}_entropy", self._entropies(trainer, module, part, noise))

    def _entropies(self, trainer: Trainer, module: "GRPOModule", batch: Any, norms: dict[str, Tensor]) -> Tensor:
        """Return the entropy of each token with `norms` in the place of the learner's."""
        layers = {f"{name}.weight": base_of(layer) for name, layer in checkpoint_modules(module.policy.network)}
        held = {name: layers[name].weight.detach().clone() for name in norms}
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            try:
                for name, noisy in norms.items():
                    layers[name].weight.copy_(noisy)
                scores = module.policy(batch, temperature=module.data.temperature, entropy=True)
            finally:
                for name, clean in held.items():
                    layers[name].weight.copy_(clean)
        return scores.entropy[batch.mask]

    def _matches(self, name: str) -> bool:
        if self.norms is None:
            return name in self._chosen
        return any(fnmatch(name, pattern) for pattern in self.norms)

    def state_dict(self) -> dict[str, Any]:
        """Return stage and σ; the draw itself depends on seed and iteration alone."""
        return {"stage": self.stage, "sigma": self.sigma}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore them."""
        self.stage, self.sigma = state_dict["stage"], state_dict["sigma"]
