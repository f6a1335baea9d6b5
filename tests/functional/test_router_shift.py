import math

import pytest
import torch

from lit_qrl.errors import ConfigError
from lit_qrl.functional.router_shift import check_floor, router_shift


def test_the_ratio_is_that_of_the_mean_move_over_layers_and_experts():
    generator = torch.Generator().manual_seed(0)
    now, before = (0.8 * torch.randn(2, 3, 4, 2, generator=generator) for _ in range(2))
    now.requires_grad_()
    got = router_shift(now, before, 0.4)
    assert not got.requires_grad
    floored = 0
    for b in range(2):
        for t in range(3):
            moved = [
                abs(float(now[b, t, layer, k].detach() - before[b, t, layer, k]))
                for layer in range(4)
                for k in range(2)
            ]
            expected = max(0.4, math.exp(-sum(moved) / 8))
            floored += expected == 0.4
            assert float(got[b, t]) == pytest.approx(expected, rel=1e-6)
    assert 0 < floored < 6


@pytest.mark.parametrize("floor", [0.0, 1.5])
def test_a_floor_that_is_no_ratio_is_refused(floor):
    with pytest.raises(ConfigError, match=r"number in \(0, 1\]"):
        check_floor(floor)
