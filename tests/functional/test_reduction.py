from typing import get_args

import pytest
import torch

from lit_qrl.functional.reduction import Reduction, count, reduce
from tests.functional.helpers import DTYPES, RTOL, listed, no_host_sync, rows


def reference(loss, b, reduction, length):
    if reduction == "sequence":
        return sum(sum(row) / len(row) for row in loss if row) / b
    flat = [x for row in loss for x in row]
    if reduction.endswith("sum"):
        return sum(flat) / (b if reduction == "sequence_sum" else 1)
    return sum(flat) / (len(flat) if reduction == "token" else b * length)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", list(get_args(Reduction)))
def test_equals_the_loop_with_its_gradient(dtype, reduction):
    loss, _, mask, _ = rows(dtype, huge=0.0)
    loss.requires_grad_()
    with no_host_sync():
        value = reduce(loss, mask, reduction, length=9)
    value.backward()
    per_row = listed(loss.detach(), mask)
    assert float(value.detach()) == pytest.approx(reference(per_row, len(mask), reduction, 9), rel=RTOL[dtype])
    for i, row in enumerate(per_row):
        wanted = {
            "sequence": 1 / max(len(row), 1) / len(mask),
            "token": 1 / sum(map(len, per_row)),
            "constant": 1 / (9 * len(mask)),
            "sequence_sum": 1 / len(mask),
            "token_sum": 1.0,
        }[reduction]
        for j in range(mask.shape[1]):
            assert float(loss.grad[i, j]) == pytest.approx(wanted if j < len(row) else 0.0, rel=RTOL[dtype])


@pytest.mark.parametrize("reduction", list(get_args(Reduction)))
def test_micro_batches_add_up_to_the_mini_batch(reduction):
    loss, _, mask, _ = rows(huge=0.0)
    whole = reduce(loss, mask, reduction, length=6)
    total = count(mask, reduction, loss.dtype)
    for cuts in ([8], [1, 7], [3, 3, 2], [1] * 8):
        parts = [reduce(x, m, reduction, 6, total) for x, m in zip(loss.split(cuts), mask.split(cuts), strict=True)]
        assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-12)


def test_nothing_left_is_zero_not_a_division_by_zero():
    loss, mask = torch.full((2, 2), float("nan")), torch.zeros(2, 2, dtype=torch.bool)
    for reduction in get_args(Reduction):
        assert float(reduce(loss, mask, reduction, 4)) == 0.0
        assert float(reduce(loss, mask, reduction, 4, total=torch.tensor(0.0))) == 0.0


def test_constant_needs_a_length_and_unknown_reductions_are_refused():
    with pytest.raises(ValueError, match="length"):
        reduce(torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), "constant")
    with pytest.raises(Exception, match="mean"):
        reduce(torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), "mean")
