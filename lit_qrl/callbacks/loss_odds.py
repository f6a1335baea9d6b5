"""What the first iterations of a run foretell of its end, said once by the guard."""

import math
from collections.abc import Iterable, Mapping
from statistics import fmean

from lit_qrl.functional import loss_models
from lit_qrl.functional.loss_odds import CORRECTIONS, EARLY_ITERATIONS, FITTED_ON, LOSS, audit_inputs, early_inputs
from lit_qrl.loop.hooks import RLCallback
from lit_qrl.shipped import shipped

ALPHA = "correction/alpha"
READ = (
    "mismatch/abs_log_ratio",
    "mismatch/log_ratio_p99",
    "mismatch/chi2_token",
    "mismatch/ess_ratio",
    "update/grad_norm",
    "update/kl",
    "update/entropy",
    "reward/mean",
    ALPHA,
)
REMEDY = {"token": "configs/correction/tis.yaml", "sequence": "configs/correction/sequence_tis.yaml"}
"""What brings a correction into a run."""


class LossForecast:
    """Keeps a run's first metrics, and from the last of them says the odds of a loss.

    Args:
        rows: of the iterations so far, as a checkpoint kept them.
    """

    def __init__(self, rows: Iterable[Mapping[str, float]] = ()) -> None:
        self.rows = [dict(row) for row in rows]

    def add(self, row: Mapping[str, float]) -> None:
        """Keep what the forecast reads of one iteration's metrics."""
        self.rows.append({name: float(row[name]) for name in READ if name in row})

    def probability(self, callbacks: Iterable[RLCallback]) -> float | None:
        """Return the probability of a loss; None before the first iterations are over, and of a run unlike any fitted.

        Args:
            callbacks: of the run, whose corrections count.
        """
        if len(self.rows) < EARLY_ITERATIONS:
            return None
        half = EARLY_ITERATIONS // 2
        first, second = (_means(rows) for rows in (self.rows[:half], self.rows[half:EARLY_ITERATIONS]))
        token, sequence = strengths(callbacks, fmean(part.get(ALPHA, 1.0) for part in (first, second)))
        inputs, model = early_inputs(first, second, token, sequence), loss_models.EARLY
        return None if model.outside(inputs) else model.probability(inputs)

    @property
    def start(self) -> float:
        """Mean |log-ratio| before the first update, in nats."""
        return self.rows[0].get("mismatch/abs_log_ratio", math.nan)


def strengths(callbacks: Iterable[RLCallback], alpha: float) -> tuple[float, float]:
    """Return how strongly weights by token correct, and whether weights or rejection by sequence do.

    Args:
        callbacks: of the run.
        alpha: mean α of AIS; 1 without it.
    """
    token = sequence = 0.0
    for callback in callbacks:
        if callback.takes_sequence_ratio:
            sequence = 1.0
        elif callback.carries_ratio:
            token = alpha
    return token, sequence


def told(probability: float, start: float) -> str:
    """Return the forecast as a person reads it, with what had better odds in the study.

    Args:
        probability: of a loss.
        start: mean |log-ratio| before the first update, nats.
    """
    model = loss_models.AUDIT
    odds = {name: model.probability(audit_inputs(start, *given)) for name, given in CORRECTIONS.items()}
    best = min(REMEDY, key=odds.__getitem__)
    if odds[best] < min(probability, 0.5):
        remedy = f"{REMEDY[best]} had {odds[best]:.0%} at such a mean |log-ratio|"
    else:
        remedy = "no correction had better odds at such a mean |log-ratio|: align the learner, or take more bits"
    return (
        f"The first {EARLY_ITERATIONS} iterations are like those of runs that ended {LOSS:g} or more below a bf16 "
        f"sampler with a probability of {probability:.0%}; {remedy}. "
        f"{FITTED_ON.format(page=shipped('docs/evidence.md'))}"
    )


def _means(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            found.setdefault(name, []).append(value)
    return {name: fmean(values) for name, values in found.items()}
