"""The odds of a loss: the callback, and what it says of an audit."""

import math

import pytest

from lit_qrl.callbacks import AIS, GeometricRejection, TruncatedIS
from lit_qrl.errors import ConfigError
from tests.callbacks.test_guard import events
from tests.examples.scripts import importing
from tests.tiny_run import fit


@pytest.fixture
def forecast():
    with importing("evidence_grid") as module:
        yield module("loss_forecast")


def row(model, **changed):
    """Return metrics of an iteration whose inputs are those of a typical run of the fit."""
    typical = dict(zip(model.inputs, model.center, strict=True))
    return {
        "mismatch/abs_log_ratio": math.exp(typical["distance"]),
        "mismatch/log_ratio_p99": math.exp(typical["tail"]),
        "mismatch/chi2_token": math.exp(typical["chi2"]) - 1,
        "mismatch/ess_ratio": typical["ess_ratio"],
        "update/grad_norm": math.exp(typical["grad_norm"]),
        "update/kl": math.exp(typical["update_kl"]),
        "update/entropy": typical["entropy"],
        "reward/mean": 0.5,
        **changed,
    }


def test_the_model_is_asked_once_the_first_iterations_are_over_and_of_known_runs_alone(forecast):
    model = forecast.loss_models.EARLY
    kept = forecast.LossForecast()
    for _ in range(forecast.EARLY_ITERATIONS):
        assert kept.probability([]) is None
        kept.add(row(model))
    inputs = forecast.early_inputs(row(model), row(model), 0.0, 0.0)
    z = model.constant + sum(
        weight * (inputs[name] - mean) / width
        for name, weight, mean, width in zip(model.inputs, model.weight, model.center, model.spread, strict=True)
    )
    assert kept.probability([]) == pytest.approx(1 / (1 + math.exp(-z)))
    assert forecast.LossForecast(kept.rows).probability([]) == kept.probability([])
    strange = forecast.LossForecast([row(model, **{"update/grad_norm": math.nan})] * forecast.EARLY_ITERATIONS)
    assert strange.probability([]) is None
    assert "configs/correction/sequence_tis.yaml had " in forecast.told(0.83, 0.2)


def test_strengths_are_those_of_the_corrections(forecast):
    assert forecast.strengths([], 1.0) == (0.0, 0.0)
    assert forecast.strengths([TruncatedIS(level="sequence")], 1.0) == (0.0, 1.0)
    assert forecast.strengths([GeometricRejection(), AIS()], 0.8) == (0.8, 1.0)


@pytest.mark.parametrize(("threshold", "warned"), [(0.5, 1), (0.95, 0)])
def test_a_beginning_that_foretells_a_loss_is_told_once(forecast, tmp_path, monkeypatch, threshold, warned):
    monkeypatch.setattr(forecast, "EARLY_ITERATIONS", 2)
    monkeypatch.setattr(forecast.LossForecast, "probability", lambda self, _: 0.9 if len(self.rows) == 2 else None)
    callback = forecast.LossOdds(threshold)
    fit(tmp_path, callbacks=[callback], trainer={"max_epochs": 4})
    assert events(tmp_path).count("loss_odds") == warned
    assert len(callback.state_dict()["rows"]) == 2
    with pytest.raises(ConfigError, match="probability"):
        forecast.LossOdds(1.5)


def test_odds_of_an_audit_are_those_of_the_fitted_model_where_it_was_fitted(forecast):
    model = forecast.loss_models.AUDIT
    assert model.weight[0] > 0  # so that odds at the ends of what was run are bounds
    distances = {"learner": 1e-6, "coarse": 0.2, "close": 1e-6, "far": 9.0}
    lines = forecast.odds_of_loss({name: {"abs_log_ratio": distance} for name, distance in distances.items()})
    assert [line.split()[0] for line in lines[2:]] == ["coarse", "close", "far"]
    expected = [model.probability(forecast.audit_inputs(0.2, *given)) for given in forecast.CORRECTIONS.values()]
    assert lines[2].split()[1:4] == [f"{one:.0%}" for one in expected]
    assert all(one[0] in "<" for one in lines[3].split()[1:4])
    assert all(one[0] in ">" for one in lines[4].split()[1:4])
