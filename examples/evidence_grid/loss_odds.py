"""The odds that a low-precision sampler costs a run its accuracy, from what its beginning shows: a logistic model.

`loss_models.py` beside this file has the models, fitted on runs of one small policy (docs/studies/evidence.md).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

LOSS = 0.05
"""Accuracy below a bf16 sampler's that counts as a loss."""
FITTED_ON = "Fitted on one small policy ({page}); not known to carry over to other models."
"""What odds that are shown are shown with."""
EARLY_ITERATIONS = 10
"""From whose metrics a running run is judged."""
CORRECTIONS = {"none": (0.0, 0.0), "token": (1.0, 0.0), "sequence": (0.0, 1.0)}
"""What a run may be corrected by, and its inputs `token` and `sequence`."""


@dataclass(frozen=True)
class LossModel:
    """A logistic model; each input has an entry in every tuple.

    Args:
        inputs: names.
        lowest: of the runs that it was fitted on.
        highest: likewise.
        center: their mean.
        spread: their standard deviation.
        weight: of the standardised input.
        constant: log-odds where all inputs are at their mean.
    """

    inputs: tuple[str, ...]
    lowest: tuple[float, ...]
    highest: tuple[float, ...]
    center: tuple[float, ...]
    spread: tuple[float, ...]
    weight: tuple[float, ...]
    constant: float

    def log_odds(self, given: Mapping[str, float]) -> float:
        """Return the log-odds of a loss.

        >>> model = LossModel(("x",), (0.0,), (4.0,), (2.0,), (1.0,), (3.0,), 0.5)
        >>> model.log_odds({"x": 3.0})
        3.5
        """
        terms = zip(self.inputs, self.center, self.spread, self.weight, strict=True)
        return self.constant + math.fsum(weight * (given[name] - mean) / width for name, mean, width, weight in terms)

    def probability(self, given: Mapping[str, float]) -> float:
        """Return the probability of a loss, in [0, 1].

        >>> LossModel(("x",), (0.0,), (4.0,), (2.0,), (1.0,), (3.0,), 0.0).probability({"x": 2.0})
        0.5
        """
        return 0.5 * (1.0 + math.tanh(0.5 * self.log_odds(given)))

    def outside(self, given: Mapping[str, float]) -> list[str]:
        """Return the inputs that lie outside of what the model was fitted on, or are not finite.

        >>> LossModel(("x",), (0.0,), (4.0,), (2.0,), (1.0,), (3.0,), 0.0).outside({"x": 5.0})
        ['x']
        """
        ranges = zip(self.inputs, self.lowest, self.highest, strict=True)
        return [name for name, low, high in ranges if not low <= given[name] <= high]


def audit_inputs(abs_log_ratio: float, token: float, sequence: float) -> dict[str, float]:
    """Return the inputs of the model `audit`.

    Args:
        abs_log_ratio: mean |log-ratio| before the first update, nats.
        token: strength of weights by token: 1, AIS's α, or 0 for none.
        sequence: 1 with weights or rejection by sequence, else 0.

    >>> audit_inputs(1.0, 0.0, 1.0)
    {'start': 0.0, 'token': 0.0, 'sequence': 1.0}
    """
    return {"start": _log(abs_log_ratio), "token": token, "sequence": sequence}


def early_inputs(
    first: Mapping[str, float], second: Mapping[str, float], token: float, sequence: float
) -> dict[str, float]:
    """Return the inputs of the model `early`, NaN where a metric is missing.

    Args:
        first: means of a run's metrics, by their name in `metrics.csv`, over the first half of its first iterations.
        second: over the second half.
        token: strength of weights by token: 1, AIS's α, or 0 for none.
        sequence: 1 with weights or rejection by sequence, else 0.
    """

    def mean(name: str) -> float:
        return 0.5 * (first.get(name, math.nan) + second.get(name, math.nan))

    def rise(name: str) -> tuple[float, float]:
        return first.get(name, math.nan), second.get(name, math.nan)

    before, after = rise("mismatch/abs_log_ratio")
    reward_before, reward_after = rise("reward/mean")
    return {
        "token": token,
        "sequence": sequence,
        "distance": _log(mean("mismatch/abs_log_ratio")),
        "tail": _log(mean("mismatch/log_ratio_p99")),
        "chi2": _log(1.0 + mean("mismatch/chi2_token")),
        "ess_ratio": mean("mismatch/ess_ratio"),
        "grad_norm": _log(mean("update/grad_norm")),
        "update_kl": _log(mean("update/kl")),
        "entropy": mean("update/entropy"),
        "growth": _log(after) - _log(before),
        "gain": reward_after - reward_before,
    }


def _log(value: float) -> float:
    return math.nan if math.isnan(value) else math.log(max(value, 1e-9))
