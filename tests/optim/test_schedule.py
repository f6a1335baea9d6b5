import math

import pytest

from lit_qrl.optim.schedule import schedule_factor


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
