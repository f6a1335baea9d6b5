"""The publisher's probe: the same tokens scored by the engine and by the learner computing as the sampler should."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lit_qrl.publish.probe import Probe, ProbeResult, learner_scores
from lit_qrl.publish.source import WeightSource
from lit_qrl.receipts.ledger import Fault, PublishError

if TYPE_CHECKING:
    from lit_qrl.module import GRPOModule

LENGTH = 64
"""Tokens of a probe's sequence, fewer where the engine's longest sequence is shorter."""


class ScoreCheck:
    """Compares the engine's log-probs with the learner's at every n-th publish, and at the first to a new engine.

    Args:
        every: publishes between two comparisons; 0 never compares.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.probe: Probe | None = None
        self.baseline: float | None = None

    def due(self, published: int, rebuilt: bool) -> bool:
        """Return True when the publish after `published` others is compared."""
        return self.every > 0 and (published % self.every == 0 or rebuilt)

    def check(
        self,
        trainer: Trainer,
        module: "GRPOModule",
        source: WeightSource,
        merged: bool,
        altered: Mapping[str, Tensor],
        version: int,
    ) -> None:
        """Score the probe on both sides.

        Args:
            trainer: whose precision plugin the learner computes under.
            module: with the policy and the engine.
            source: of what was published.
            merged: False when an adapter stands beside the base.
            altered: tensors that callbacks changed, by parameter name; an empty one stands for a whole matrix.
            version: of the publish.

        Raises:
            PublishError: when the mean difference is beyond the bound, or a score is not finite.
        """
        if (source.packed and source.aligned is None) or any(tensor.numel() == 0 for tensor in altered.values()):
            return  # the learner cannot compute as this sampler does
        start = time.perf_counter()
        engine, network = module.data.engine, module.policy.network
        probe = self._probe_of(module, source)
        settings: dict[str, Any] = {
            "format": None if source.aligned is not None else source.format,
            "exclude": source.exclude,
            "head": source.head,
            "merged": merged,
            "overrides": dict(altered) or None,
        }
        with trainer.precision_plugin.forward_context():
            learner = learner_scores(network, probe.tokens, **settings)
            scores = engine.score(probe.tokens)
            result = probe.compare(scores, learner)
            if not result.passed and probe.baseline is None:
                dtype = source.plain_dtype(engine) or next(network.parameters()).dtype
                jittered = learner_scores(network, probe.tokens, **settings, jitter=torch.finfo(dtype).eps / 2)
                result = probe.compare(scores, learner, jittered)
        self.baseline = probe.baseline
        module.iteration.metrics.update(
            {"publish/probe_mean": result.mean, "publish/probe_max": result.max, "publish/probe_bound": result.bound}
        )
        module.iteration.seconds["verify"] += time.perf_counter() - start
        if not result.passed:
            raise PublishError([Fault("probe", "the sampler", _measured(result))], version)

    def _probe_of(self, module: "GRPOModule", source: WeightSource) -> Probe:
        if self.probe is None:
            length = min(LENGTH, module.data.max_prompt_tokens + module.data.max_completion_tokens)
            noisy = source.format is not None and source.format.quantizes_activations
            vocabulary = module.policy.network.config.get_text_config().vocab_size
            self.probe = Probe(vocabulary, noisy, length=length)
            self.probe.load_state_dict({"baseline": self.baseline})
        return self.probe


def _measured(result: ProbeResult) -> str:
    scores = f"mean |Δ log p| {result.mean:.3g}, at most {result.bound:.3g} expected"
    return f"{result.nonfinite} scores are not finite" if result.nonfinite else scores
