"""Watches how far sampler and learner disagree, each iteration, on the same masks as everything else."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from lit_qrl.data.environment import MultiTurnTask
from lit_qrl.errors import ConfigError, named
from lit_qrl.functional.diagnostics import (
    QUADRANTS,
    accepted_by_length,
    histogram2d_by_sign,
    low_probability_share,
    mean_by_position,
    mean_by_turn,
    quadrant_shares,
    ratio_counts,
    ratio_quantiles,
    repeated_ngrams,
)
from lit_qrl.functional.importance import log_ratio
from lit_qrl.functional.mismatch import k3_divergence, mismatch_metrics
from lit_qrl.loop.hooks import RLCallback
from lit_qrl.objective import Objective
from lit_qrl.types import AllReduce, RolloutBatch

if TYPE_CHECKING:
    from lit_qrl.module import GRPOModule

BINS, POSITION_BINS, LENGTH_BINS = (40, 20), 16, 8
"""Of a picture: of log ratios and probabilities, of positions, of lengths."""
TURNS = 4
"""Turns whose mismatch is told apart; the last takes all that come later."""
LIMIT = 0.5
"""Log ratios drawn, in nats either side; the outer bins take what lies beyond."""
QUANTILES = {"p01": 0.01, "p99": 0.99}


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
        d = log_ratio(learner, sampler, mask)
        shares = quadrant_shares(d, mask, rollout.advantages, all_reduce=pl_module.reduce)
        pl_module.iteration.metrics.update(
            {f"mismatch/share_{name}": share for name, share in zip(QUADRANTS, shares.unbind(), strict=True)}
        )
        if isinstance(pl_module.data.task, MultiTurnTask):
            self._by_turn(pl_module, d, mask)
        rare = low_probability_share(learner, mask, rollout.advantages, all_reduce=pl_module.reduce)
        pl_module.iteration.metrics.value("rollout/low_probability_negative", rare)
        if draw:
            drawn = self._histograms(pl_module, d, sampler, mask, rollout.advantages)
            drawn += updates.histograms(pl_module.objective, limit, pl_module.reduce)
            self._write(trainer, drawn)

    @staticmethod
    def _by_turn(module: "GRPOModule", d: Tensor, mask: Tensor) -> None:
        """Log the mismatch of each turn; from the second on it follows what a tool or an environment said."""
        for name, values in (("abs_log_ratio", d.abs()), ("kl_k3", k3_divergence(d))):
            means, counts = mean_by_turn(values, mask, TURNS, all_reduce=module.reduce)
            for turn, (mean, count) in enumerate(zip(means.tolist(), counts.tolist(), strict=True), start=1):
                if count:
                    module.iteration.metrics.value(f"mismatch/{name}_turn_{turn}", mean)

    def _histograms(
        self, module: "GRPOModule", d: Tensor, sampler: Tensor, mask: Tensor, advantages: Tensor
    ) -> list[dict[str, Any]]:
        counts = histogram2d_by_sign(d, sampler, mask, advantages, limit=LIMIT, bins=BINS, all_reduce=module.reduce)
        limit = mask.shape[1]
        bins = min(POSITION_BINS, limit)
        drawn = [
            signed(f"{sign} samples", counts[index], "log mismatch weight (nats)", "sampler probability")
            for index, sign in enumerate(("Negative", "Positive"))
        ]
        for title, label, values in (
            ("Mismatch by position", "mean |d| (nats)", d.abs()),
            ("KL by position", "k3 (nats)", k3_divergence(d)),
        ):
            means, _ = mean_by_position(values, mask, bins=bins, all_reduce=module.reduce)
            drawn.append(heights(title, label, means.nan_to_num(0.0), "completion token", limit))
        return drawn

    @staticmethod
    @rank_zero_only
    def _write(trainer: Trainer, histograms: list[dict[str, Any]]) -> None:
        path = Path(trainer.default_root_dir) / "histograms.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        with named(path):
            path.write_text(json.dumps({"iteration": trainer.current_epoch + 1, "histograms": histograms}))


def signed(title: str, counts: Tensor, value: str, probability: str) -> dict[str, Any]:
    """Return a picture of `histograms.json`: counts by log ratio and probability, with what their axes are called."""
    x, y = (
        torch.linspace(low, high, bins + 1).tolist()
        for (low, high), bins in zip(((-LIMIT, LIMIT), (0, 1)), BINS, strict=True)
    )
    return {
        "title": title,
        "x": {"label": value, "edges": x},
        "y": {"label": probability, "edges": y},
        "counts": counts.tolist(),
    }


def heights(title: str, label: str, values: Tensor, axis: str, limit: int) -> dict[str, Any]:
    """Return a picture of `histograms.json`: one value for each of equal parts of the completion's length."""
    edges = torch.linspace(0, limit, len(values) + 1).tolist()
    return {"title": title, "x": {"label": axis, "edges": edges}, "counts": {label: values.tolist()}, "scale": "linear"}


class UpdateCounts:
    """Counts of one iteration that add up over micro-batches: update ratios, and accepted sequences by length."""

    def __init__(self) -> None:
        self._counts: dict[str, Tensor] = {}

    def add(self, logprobs: Tensor, batch: RolloutBatch, length: int, draw: bool) -> None:
        """Count a micro-batch.

        Args:
            logprobs: "b t", of the learner that was just trained on it.
            batch: with learner_old's log-probs.
            length: the completion limit, in tokens.
            draw: also count what only the pictures need.
        """
        old, mask = batch.learner_old_logprobs, batch.mask
        if old is not None:
            d = torch.where(mask, logprobs.float() - old.float(), 0.0)
            self._add("ratio", ratio_counts(d, mask))
            if draw:
                self._add("map", histogram2d_by_sign(d, old, mask, batch.advantages, limit=LIMIT, bins=BINS))
        if draw and (batch.keep is not None or batch.weights is not None):
            accepted = mask if batch.keep is None else mask & batch.keep
            if batch.weights is not None:  # a weight of 0 is a rejection that stays in the denominator
                accepted = accepted & (batch.weights != 0)
            share, count = accepted_by_length(accepted, mask, LENGTH_BINS, length)
            self._add("lengths", torch.stack([share * count, count]))

    def _add(self, name: str, counts: Tensor) -> None:
        self._counts[name] = self._counts[name] + counts if name in self._counts else counts

    def quantiles(self, all_reduce: AllReduce) -> dict[str, Tensor]:
        """Return `update/ratio_p01` and `update/ratio_p99`, over all ranks; nothing where nothing was counted."""
        if "ratio" not in self._counts:
            return {}
        found = ratio_quantiles(all_reduce(self._counts["ratio"]), list(QUANTILES.values()))
        return {f"update/ratio_{name}": value for name, value in zip(QUANTILES, found.unbind(), strict=True)}

    def histograms(self, objective: Objective, length: int, all_reduce: AllReduce) -> list[dict[str, Any]]:
        """Return the pictures for `histograms.json`: QaRL Fig. 5 with the clip's edges, and acceptance by length."""
        drawn: list[dict[str, Any]] = []
        if "map" in self._counts:
            counts = all_reduce(self._counts["map"])
            for index, sign in enumerate(("negative", "positive")):
                one = signed(
                    f"Updates of {sign} samples", counts[index], "log update ratio (nats)", "probability before"
                )
                drawn.append({**one, "lines": clip_edges(objective, sign)})
        if "lengths" in self._counts:
            accepted, count = all_reduce(self._counts["lengths"]).unbind()
            if bool((accepted < count).any()):
                shares = accepted / count.clamp(min=1)
                drawn.append(heights("Accepted by length", "share of sequences", shares, "completion tokens", length))
        return drawn


def clip_edges(objective: Objective, sign: str) -> list[float]:
    """Return where the objective's clip lies for samples of a sign, as log ratios within the picture.

    >>> from lit_qrl.objective import GRPO
    >>> [round(edge, 3) for edge in clip_edges(GRPO(), "positive")]
    [-0.223, 0.182]
    """
    settings = vars(objective)
    negative = sign == "negative"
    low = settings.get("neg_low" if negative and "neg_low" in settings else "clip_low")
    high = settings.get("neg_high" if negative and "neg_high" in settings else "clip_high")
    ratios = [None if low is None else 1 - low, None if high is None else 1 + high]
    if negative:
        ratios.append(settings.get("dual_clip"))
    edges = [math.log(ratio) for ratio in ratios if ratio is not None and ratio > 0]
    return [edge for edge in edges if abs(edge) <= LIMIT]
