from types import SimpleNamespace

import pytest
import torch

from lit_qrl.functional.evaluation import pass_at_k
from lit_qrl.loop.evaluation import PassAtK
from lit_qrl.loop.state import IterationMetrics, log_row
from lit_qrl.types import no_all_reduce


def test_pass_at_k_is_the_mean_over_all_problems():
    correct = torch.rand(20, 6, generator=torch.Generator().manual_seed(0)) < 0.3
    for k in (1, 4):
        metric = PassAtK(k)
        metric.update(correct[:7])
        metric.update(correct[7:])
        assert float(metric.compute()) == pytest.approx(float(pass_at_k(correct, k).mean()), abs=1e-6)
    with pytest.raises(ValueError, match="at least 4 samples"):
        PassAtK(4).update(torch.zeros(2, 3, dtype=torch.bool))


def test_iteration_metrics_weigh_by_count_and_start_anew():
    record = IterationMetrics()
    record.add("kl", torch.tensor([3.0, 3.0]))
    record.add("kl", torch.tensor([1.0, 1.0]))
    record.add("empty", torch.tensor([0.0, 0.0]))
    record.value("alpha", 0.5)
    record.value("alpha", torch.tensor(1.0))
    assert record.compute(no_all_reduce) == {"kl": 1.0, "alpha": 0.75}
    assert record.compute(no_all_reduce) == {}


def test_a_row_reaches_every_logger_and_whoever_asks_the_trainer():
    logged, saved = [], []
    logger = SimpleNamespace(
        log_metrics=lambda metrics, step: logged.append((metrics, step)), save=lambda: saved.append(True)
    )
    trainer = SimpleNamespace(
        callback_metrics={"val/accuracy": torch.tensor(0.25), "reward/mean": torch.tensor(0.5)},
        logged_metrics={},
        loggers=[logger, logger],
        current_epoch=3,
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=8)),
    )
    log_row(trainer, {"reward/mean": 0.75})
    assert logged == [({"reward/mean": 0.75, "epoch": 3}, 8)] * 2
    assert len(saved) == 2
    assert {name: float(value) for name, value in trainer.callback_metrics.items()} == {
        "val/accuracy": 0.25,
        "reward/mean": 0.75,
    }
    assert float(trainer.logged_metrics["reward/mean"]) == 0.75


def test_a_row_shows_no_phase_of_an_earlier_one():
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=0))
    trainer = SimpleNamespace(callback_metrics={}, logged_metrics={}, fit_loop=loop, loggers=[], current_epoch=0)
    log_row(trainer, {"time/publish": 0.5, "time/update": 1.0, "val/accuracy": 0.25})
    log_row(trainer, {"time/update": 2.0})
    for known in (trainer.callback_metrics, trainer.logged_metrics):
        assert {name: float(value) for name, value in known.items()} == {"time/update": 2.0, "val/accuracy": 0.25}
