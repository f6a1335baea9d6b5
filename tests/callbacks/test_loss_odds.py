import math

import pytest

from lit_qrl.callbacks import AIS, GeometricRejection, Guard, TruncatedIS
from lit_qrl.callbacks.loss_odds import ALPHA, READ, LossForecast, strengths, told
from lit_qrl.functional.loss_models import EARLY
from lit_qrl.functional.loss_odds import EARLY_ITERATIONS, early_inputs


def typical(name):
    """Return the middle of what the model of the first iterations was fitted on."""
    model = EARLY
    return dict(zip(model.inputs, model.center, strict=True))[name]


def row(**changed):
    """Return metrics of an iteration whose inputs are those of a typical run."""
    return {
        "mismatch/abs_log_ratio": math.exp(typical("distance")),
        "mismatch/log_ratio_p99": math.exp(typical("tail")),
        "mismatch/chi2_token": math.exp(typical("chi2")) - 1,
        "mismatch/ess_ratio": typical("ess_ratio"),
        "update/grad_norm": math.exp(typical("grad_norm")),
        "update/kl": math.exp(typical("update_kl")),
        "update/entropy": typical("entropy"),
        "reward/mean": 0.5,
        "time/iteration": 1.0,
        **changed,
    }


def filled(**changed):
    forecast = LossForecast()
    for _ in range(EARLY_ITERATIONS):
        forecast.add(row(**changed))
    return forecast


@pytest.mark.parametrize(
    ("callbacks", "alpha", "expected"),
    [
        ([], 1.0, (0.0, 0.0)),
        ([TruncatedIS()], 1.0, (1.0, 0.0)),
        ([AIS()], 0.8, (0.8, 0.0)),
        ([TruncatedIS(level="sequence")], 1.0, (0.0, 1.0)),
        ([GeometricRejection(), AIS()], 0.8, (0.8, 1.0)),
        ([Guard()], 1.0, (0.0, 0.0)),
    ],
)
def test_strengths_are_those_of_the_corrections(callbacks, alpha, expected):
    assert strengths(callbacks, alpha) == expected


def test_the_model_is_asked_once_the_first_iterations_are_over():
    forecast = LossForecast()
    for _ in range(EARLY_ITERATIONS):
        assert forecast.probability([]) is None
        forecast.add(row())
    inputs = early_inputs(row(), row(), 0.0, 0.0)
    assert forecast.probability([]) == pytest.approx(EARLY.probability(inputs))
    assert set(forecast.rows[0]) == set(READ) - {ALPHA}
    # what a checkpoint kept goes on where it was
    assert LossForecast(forecast.rows).probability([]) == forecast.probability([])


def test_nothing_is_said_of_a_run_unlike_those_of_the_study():
    assert filled(**{"mismatch/abs_log_ratio": 1e-7}).probability([]) is None
    assert filled(**{"update/grad_norm": math.nan}).probability([]) is None
    forecast = LossForecast({} for _ in range(EARLY_ITERATIONS))
    assert forecast.probability([]) is None


def test_ais_counts_as_strongly_as_its_gate_let_it():
    weak, strong = (filled(**{ALPHA: alpha}).probability([AIS()]) for alpha in (0.3, 0.95))
    inputs = early_inputs(row(), row(), 0.3, 0.0)
    assert weak == pytest.approx(EARLY.probability(inputs))
    assert weak != strong


def test_what_is_told_names_the_correction_with_the_best_odds():
    said = told(0.83, 0.2)
    assert "83%" in said
    assert "configs/correction/sequence_tis.yaml had " in said
    assert "align the learner" in told(0.99, 1.0) or "configs/correction" in told(0.99, 1.0)
