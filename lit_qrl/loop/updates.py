"""How far an iteration's updates moved the learner, token by token, collected over the micro-batches."""

import math
from typing import Any

import torch
from torch import Tensor

from lit_qrl.functional.diagnostics import accepted_by_length, histogram2d_by_sign, ratio_counts, ratio_quantiles
from lit_qrl.objective import Objective
from lit_qrl.types import AllReduce, RolloutBatch

VALUE_BINS, PROBABILITY_BINS, LENGTH_BINS = 40, 20, 8
LOG_RATIO_LIMIT = 0.5
"""Log ratios drawn, in nats either side; the outer bins take what lies beyond."""
QUANTILES = {"p01": 0.01, "p99": 0.99}


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
                bins = (VALUE_BINS, PROBABILITY_BINS)
                self._add("map", histogram2d_by_sign(d, old, mask, batch.advantages, limit=LOG_RATIO_LIMIT, bins=bins))
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
        drawn = []
        if "map" in self._counts:
            counts = all_reduce(self._counts["map"])
            values = torch.linspace(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT, VALUE_BINS + 1).tolist()
            probabilities = torch.linspace(0, 1, PROBABILITY_BINS + 1).tolist()
            drawn += [
                {
                    "title": f"Updates of {sign} samples",
                    "x": {"label": "log update ratio (nats)", "edges": values},
                    "y": {"label": "probability before", "edges": probabilities},
                    "counts": counts[index].tolist(),
                    "lines": clip_edges(objective, sign),
                }
                for index, sign in enumerate(("negative", "positive"))
            ]
        if "lengths" in self._counts:
            accepted, count = all_reduce(self._counts["lengths"]).unbind()
            if bool((accepted < count).any()):
                drawn.append(
                    {
                        "title": "Accepted by length",
                        "x": {
                            "label": "completion tokens",
                            "edges": torch.linspace(0, length, LENGTH_BINS + 1).tolist(),
                        },
                        "counts": {"share of sequences": (accepted / count.clamp(min=1)).tolist()},
                        "scale": "linear",
                    }
                )
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
    return [edge for edge in edges if abs(edge) <= LOG_RATIO_LIMIT]
