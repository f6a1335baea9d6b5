"""What the first iterations of a run foretell of its end, as a callback; and the odds of what an audit measured.

PYTHONPATH=examples/evidence_grid lit-qrl fit --config … --trainer.callbacks+ loss_forecast.LossOdds
python examples/evidence_grid/loss_forecast.py audit.json     # written by lit-qrl audit --out
"""

import json
import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import loss_models
from lightning.pytorch import Trainer
from loss_odds import CORRECTIONS, EARLY_ITERATIONS, FITTED_ON, LOSS, audit_inputs, early_inputs

from lit_qrl.errors import ConfigError
from lit_qrl.loop.hooks import RLCallback, rl_callbacks
from lit_qrl.run.event_log import tell
from lit_qrl.shipped import shipped

if TYPE_CHECKING:
    from lit_qrl.module import GRPOModule

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


class LossOdds(RLCallback):
    """Writes one event when the first ten iterations of a run are like those of runs that low precision cost accuracy.

    Nothing is said of a run that is unlike all that the model was fitted on.

    Args:
        threshold: probability of a loss from which it is said.
    """

    def __init__(self, threshold: float = 0.5) -> None:
        if not 0 <= threshold <= 1:
            raise ConfigError("threshold is a probability.", expected="[0, 1]", given=threshold)
        self.threshold, self.forecast = threshold, LossForecast()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: "GRPOModule") -> None:
        """Keep the iteration's metrics, and say what they foretell once there are enough."""
        row = pl_module.iteration.row  # empty at the epoch end that a resumed run repeats
        if not row or len(self.forecast.rows) >= EARLY_ITERATIONS:
            return
        self.forecast.add(row)
        odds = self.forecast.probability(rl_callbacks(trainer))
        if odds is not None and odds >= self.threshold:
            tell(trainer, "loss_odds", told(odds, self.forecast.start), probability=odds)

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept of the first iterations."""
        return {"rows": self.forecast.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the first iterations."""
        self.forecast = LossForecast(state_dict["rows"])


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
        f"{FITTED_ON.format(page=shipped('docs/studies/evidence.md'))}"
    )


def _means(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            found.setdefault(name, []).append(value)
    return {name: fmean(values) for name, values in found.items()}


def odds_of_loss(results: dict[str, dict[str, float]]) -> list[str]:
    """Return lines that say of each format how likely a run is to lose by it, and with which correction least.

    Args:
        results: metrics by format, the learner's own arithmetic among them.
    """
    fitted_on = FITTED_ON.format(page=shipped("docs/studies/evidence.md"))
    lines = [f"Odds of a loss of {LOSS:g} or more at such a mean |d|. {fitted_on}"]
    width = max(14, *(len(title) + 2 for title in results))
    lines += [f"{'format':<{width}}" + "".join(f"{name:>12}" for name in CORRECTIONS)]
    lowest, highest = math.exp(loss_models.AUDIT.lowest[0]), math.exp(loss_models.AUDIT.highest[0])
    for title, metrics in results.items():
        if title == "learner":
            continue
        distance = metrics["abs_log_ratio"]
        # the odds rise with the distance, so those of the nearest that was run are a bound
        sign = "<" if distance < lowest else ">" if distance > highest else ""
        near = min(max(distance, lowest), highest)
        odds = {name: loss_models.AUDIT.probability(audit_inputs(near, *given)) for name, given in CORRECTIONS.items()}
        best = min(odds, key=odds.__getitem__)
        advice = "" if odds["none"] < 0.5 else f"  {best}-level weights" if odds[best] < 0.5 else "  align the learner"
        lines.append(f"{title:<{width}}" + "".join(f"{_percent(one, sign):>12}" for one in odds.values()) + advice)
    return lines


def _percent(odds: float, sign: str) -> str:
    """Return odds in whole percent, of which none is 0 or 100.

    >>> [_percent(0.002, ""), _percent(0.004, "<"), _percent(0.42, ">"), _percent(0.999, "")]
    ['<1%', '<1%', '>42%', '>99%']
    """
    if odds < 0.005:
        return "<1%"
    return ">99%" if odds > 0.995 else f"{sign}{odds:.0%}"


if __name__ == "__main__":
    print("\n".join(odds_of_loss(json.loads(Path(sys.argv[1]).read_text())["formats"])))
