import math

import pytest
import torch
from lightning.pytorch.cli import ReduceLROnPlateau
from torch.optim.lr_scheduler import OneCycleLR

from lit_qrl.errors import ConfigError
from lit_qrl.optim.schedule import schedule_factor, scheduled
from tests.tiny_run import build


def test_warmup_rises_to_one_and_cosine_ends_at_zero():
    factors = [schedule_factor(step, 200, "cosine", 0.05) for step in range(201)]
    assert factors[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert factors[10] == 1.0
    assert factors[105] == pytest.approx((1 + math.cos(math.pi * 0.5)) / 2)
    assert factors[200] == pytest.approx(0.0, abs=1e-12)


def test_linear_and_constant():
    assert schedule_factor(50, 100, "linear", 0.0) == 0.5
    assert schedule_factor(99, 100, "constant", 0.0) == 1.0
    assert schedule_factor(0, 3, "constant", 0.0) == 1.0


def sgd():
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)


def test_a_plateau_is_looked_for_where_its_metric_is_new():
    def made(monitor):
        return scheduled(sgd(), 10, own=lambda one: ReduceLROnPlateau(one, monitor), evaluated_every=5)

    iteration, evaluation = made("reward/mean"), made("val/accuracy")
    assert (iteration["interval"], iteration["frequency"], iteration["monitor"]) == ("epoch", 1, "reward/mean")
    assert (evaluation["interval"], evaluation["frequency"]) == ("epoch", 5)


def test_a_plateau_of_nothing_and_an_end_before_the_run_are_refused():
    with pytest.raises(ConfigError, match=r"plateau of no metric.*lightning\.pytorch\.cli\.ReduceLROnPlateau"):
        scheduled(sgd(), 10, own=torch.optim.lr_scheduler.ReduceLROnPlateau)
    with pytest.raises(ConfigError, match=r"takes 10 optimizer steps.*Given: 9"):
        scheduled(sgd(), 10, own=lambda one: OneCycleLR(one, 0.1, total_steps=9))
    assert scheduled(sgd(), 10, own=lambda one: OneCycleLR(one, 0.1, total_steps=10))["interval"] == "step"


def test_a_run_lowers_its_rate_on_a_plateau(tmp_path):
    trainer, module, data = build(tmp_path, trainer={"max_epochs": 3}, lr=0.1)
    options = {"mode": "max", "patience": 0, "threshold": 100.0, "factor": 0.5}
    module.lr_scheduler = lambda made: ReduceLROnPlateau(made, "reward/mean", **options)
    trainer.fit(module, datamodule=data)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**2)  # the first sets the bar


def test_a_resumed_run_has_seen_what_the_one_before_saw(tmp_path):
    options = {"mode": "max", "patience": 1, "threshold": 100.0, "factor": 0.5}

    def run(folder, iterations, checkpoint=None):
        trainer, module, data = build(folder, trainer={"max_epochs": iterations}, lr=0.1)
        trainer.checkpoint_callback.keep_every = 1
        module.lr_scheduler = lambda made: ReduceLROnPlateau(made, "reward/mean", **options)
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
        scheduler = trainer.lr_scheduler_configs[0].scheduler
        return trainer.optimizers[0].param_groups[0]["lr"], scheduler.num_bad_epochs, scheduler.last_epoch

    whole = run(tmp_path / "whole", 4)
    assert whole[0] == pytest.approx(0.05)
    for iteration in (1, 2, 3):
        saved = tmp_path / "whole" / "run" / "checkpoints" / f"iteration-{iteration}.ckpt"
        assert run(tmp_path / f"from-{iteration}", 4, saved) == whole
