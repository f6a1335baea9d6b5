import math

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR

from lit_qrl.errors import ConfigError
from lit_qrl.optim.schedule import schedule_factor, scheduled


def test_warmup_rises_to_one_cosine_ends_at_zero_and_the_others_are_what_they_say():
    factors = [schedule_factor(step, 200, "cosine", 0.05) for step in range(201)]
    assert factors[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert factors[10] == 1.0
    assert factors[105] == pytest.approx((1 + math.cos(math.pi * 0.5)) / 2)
    assert factors[200] == pytest.approx(0.0, abs=1e-12)
    assert schedule_factor(50, 100, "linear", 0.0) == 0.5
    assert schedule_factor(99, 100, "constant", 0.0) == 1.0
    assert schedule_factor(0, 3, "constant", 0.0) == 1.0


def sgd():
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)


def test_a_plateau_and_an_end_before_the_run_are_refused():
    with pytest.raises(ConfigError, match=r"waits on the plateau of a metric.*EarlyStopping"):
        scheduled(sgd(), 10, own=torch.optim.lr_scheduler.ReduceLROnPlateau)
    with pytest.raises(ConfigError, match=r"takes 10 optimizer steps.*Given: 9"):
        scheduled(sgd(), 10, own=lambda one: OneCycleLR(one, 0.1, total_steps=9))
    assert scheduled(sgd(), 10, own=lambda one: OneCycleLR(one, 0.1, total_steps=10))["interval"] == "step"
