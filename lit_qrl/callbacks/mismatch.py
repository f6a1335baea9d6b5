"""Watches how far sampler and learner disagree, each iteration, on the same masks as everything else."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from lit_qrl.errors import ConfigError
from lit_qrl.functional.diagnostics import histogram2d_by_sign, low_probability_share, mean_by_position, repeated_ngrams
from lit_qrl.functional.importance import log_ratio
from lit_qrl.functional.mismatch import k3_divergence, mismatch_metrics
from lit_qrl.loop.ahead import tell_ages
from lit_qrl.loop.hooks import RLCallback
from lit_qrl.loop.updates import UpdateCounts
from lit_qrl.run.event_log import tell

if TYPE_CHECKING:
    from lit_qrl.module import GRPOModule

VALUE_BINS, PROBABILITY_BINS, POSITION_BINS = 40, 20, 16
LOG_WEIGHT_LIMIT = 0.5
"""Log weights drawn, in nats either side; the outer bins take what lies beyond."""


class MismatchMonitor(RLCallback):
    """Logs `mismatch/*`: learner_old against sampler, over the rollout, and draws where it sits.

    It reads the rollout at the end of the iteration. Where learner_old was not scored on its own, its log-probs are the
    training forward's: of the whole rollout with one update, else of the sequences before the first. Quantiles of the
    update ratio, learner over learner_old, it collects from the updates themselves. `histograms.json` in the run folder
    holds the last iteration's pictures: by sign of the advantage, log mismatch weight against sampler probability (QaRL
    Fig. 4) and log update ratio against the probability before (Fig. 5); mean |d| and KL by position; and what a
    rejection accepts by length.

    Args:
        every_n_iterations: iterations between measurements.
        histograms_every: iterations between rewrites of `histograms.json`; 0 writes none.
    """

    def __init__(self, every_n_iterations: int = 1, histograms_every: int = 10) -> None:
        if every_n_iterations < 1 or histograms_every < 0:
            raise ConfigError(
                "monitor counts iterations.", expected="every_n_iterations >= 1 and histograms_every >= 0"
            )
        self.every_n_iterations, self.histograms_every = every_n_iterations, histograms_every
        self._updates = UpdateCounts()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: "GRPOModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count every update; measure the iteration's mismatch after the last one."""
        rollout = pl_module.iteration.rollout
        if rollout is None or trainer.current_epoch % self.every_n_iterations:
            return
        last = trainer.current_epoch + 1 == trainer.max_epochs
        draw = bool(self.histograms_every) and (last or trainer.current_epoch % self.histograms_every == 0)
        limit = pl_module.data.max_completion_tokens
        if pl_module.iteration.logprobs is not None:
            self._updates.add(pl_module.iteration.logprobs, batch.batch, limit, draw)
        if not trainer.is_last_batch:
            return
        updates, self._updates = self._updates, UpdateCounts()
        pl_module.iteration.metrics.update(updates.quantiles(pl_module.reduce))
        completions = rollout.tokens[:, rollout.tokens.shape[1] - rollout.mask.shape[1] :]
        pl_module.iteration.metrics.values("rollout/repeated_4grams", repeated_ngrams(completions, rollout.mask))
        measured = pl_module.iteration.measured()
        if measured is None or measured.learner_old_logprobs is None:
            return
        learner, sampler, mask = measured.learner_old_logprobs, measured.sampler_logprobs, measured.mask
        metrics = mismatch_metrics(learner, sampler, mask, all_reduce=pl_module.reduce)
        pl_module.iteration.metrics.update({f"mismatch/{name}": value for name, value in metrics.items()})
        rare = low_probability_share(learner, mask, rollout.advantages, all_reduce=pl_module.reduce)
        pl_module.iteration.metrics.value("rollout/low_probability_negative", rare)
        if draw:
            d = log_ratio(learner, sampler, mask)
            drawn = self._histograms(pl_module, d, sampler, mask, rollout.advantages)
            drawn += updates.histograms(pl_module.objective, limit, pl_module.reduce)
            self._write(trainer, drawn)

    def on_train_end(self, trainer: Trainer, pl_module: "GRPOModule") -> None:
        """Say how old the weights were that drew the tokens, where rollouts were drawn ahead."""
        told, ahead = tell_ages(pl_module), pl_module.data.ahead
        if told and ahead is not None:
            tell(trainer, "ages", told, tokens={str(age): count for age, count in ahead.tokens_of_age.items()})

    def _histograms(
        self, module: "GRPOModule", d: Tensor, sampler: Tensor, mask: Tensor, advantages: Tensor
    ) -> list[dict[str, Any]]:
        bins = (VALUE_BINS, PROBABILITY_BINS)
        counts = histogram2d_by_sign(
            d, sampler, mask, advantages, limit=LOG_WEIGHT_LIMIT, bins=bins, all_reduce=module.reduce
        )
        limit = mask.shape[1]
        bins = min(POSITION_BINS, limit)
        parts = {
            "Mismatch by position": ("mean |d| (nats)", d.abs()),
            "KL by position": ("k3 (nats)", k3_divergence(d)),
        }
        means = {
            title: (label, mean_by_position(values, mask, bins=bins, all_reduce=module.reduce)[0].nan_to_num(0.0))
            for title, (label, values) in parts.items()
        }
        values = torch.linspace(-LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT, VALUE_BINS + 1).tolist()
        probabilities = torch.linspace(0, 1, PROBABILITY_BINS + 1).tolist()
        positions = torch.linspace(0, limit, bins + 1).tolist()
        weight, probability = {"label": "log mismatch weight (nats)", "edges": values}, "sampler probability"
        return [
            {
                "title": f"{sign} samples",
                "x": weight,
                "y": {"label": probability, "edges": probabilities},
                "counts": counts[index].tolist(),
            }
            for index, sign in enumerate(("Negative", "Positive"))
        ] + [
            {
                "title": title,
                "x": {"label": "completion token", "edges": positions},
                "counts": {label: heights.tolist()},
                "scale": "linear",
            }
            for title, (label, heights) in means.items()
        ]

    @staticmethod
    @rank_zero_only
    def _write(trainer: Trainer, histograms: list[dict[str, Any]]) -> None:
        path = Path(trainer.default_root_dir) / "histograms.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"iteration": trainer.current_epoch + 1, "histograms": histograms}))
