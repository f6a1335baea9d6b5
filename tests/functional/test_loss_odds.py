import math

import pytest

from lit_qrl.functional.loss_models import AUDIT, EARLY
from lit_qrl.functional.loss_odds import LossModel, audit_inputs, early_inputs

MODEL = LossModel(("a", "b"), (-1.0, 0.0), (1.0, 4.0), (0.5, 2.0), (0.25, 2.0), (1.5, -0.5), 0.2)
ROW = {
    "mismatch/abs_log_ratio": 0.2,
    "mismatch/log_ratio_p99": 2.0,
    "mismatch/chi2_token": 0.5,
    "mismatch/ess_ratio": 0.7,
    "update/grad_norm": 0.4,
    "update/kl": 0.01,
    "update/entropy": 0.3,
    "reward/mean": 0.4,
}


@pytest.mark.parametrize(
    "given", [{"a": 0.5, "b": 2.0}, {"a": 1.0, "b": 0.0}, {"a": -30.0, "b": 4.0}, {"a": 60.0, "b": 0.0}]
)
def test_the_probability_is_the_logistic_of_standardised_inputs(given):
    z = 0.2 + 1.5 * (given["a"] - 0.5) / 0.25 - 0.5 * (given["b"] - 2.0) / 2.0
    assert MODEL.log_odds(given) == pytest.approx(z)
    assert MODEL.probability(given) == pytest.approx(1 / (1 + math.exp(-z)), abs=1e-12)


def test_what_was_not_seen_is_outside():
    assert MODEL.outside({"a": 1.0, "b": 0.0}) == []
    assert MODEL.outside({"a": 1.1, "b": -0.1}) == ["a", "b"]
    assert MODEL.outside({"a": math.nan, "b": math.inf}) == ["a", "b"]


def test_inputs_of_the_first_iterations():
    second = {**ROW, "mismatch/abs_log_ratio": 0.1, "reward/mean": 0.5, "update/kl": 0.03}
    inputs = early_inputs(ROW, second, 0.9, 1.0)
    assert inputs["distance"] == pytest.approx(math.log(0.15))
    assert inputs["growth"] == pytest.approx(-math.log(2))
    assert inputs["gain"] == pytest.approx(0.1)
    assert inputs["chi2"] == pytest.approx(math.log(1.5))
    assert inputs["update_kl"] == pytest.approx(math.log(0.02))
    assert (inputs["token"], inputs["sequence"]) == (0.9, 1.0)
    assert set(inputs) == set(EARLY.inputs)
    assert set(audit_inputs(0.2, 0.0, 0.0)) == set(AUDIT.inputs)
    # a policy that is exactly on policy has a logarithm, a missing metric has no value
    assert math.isfinite(audit_inputs(0.0, 0.0, 0.0)["start"])
    del second["update/grad_norm"]
    assert math.isnan(early_inputs(ROW, second, 0.0, 0.0)["grad_norm"])
