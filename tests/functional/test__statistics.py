import pytest
import torch

from lit_qrl.functional import _statistics as statistics
from tests.functional.helpers import no_host_sync, on_ranks, rows


def test_largest_and_share_over_ranks():
    learner, _, mask, _ = rows()
    values = [float(v) for row, m in zip(learner, mask, strict=True) for v in row[m]]
    assert float(on_ranks(statistics.largest, mask, learner)) == max(values)
    low = sum(value < -1 for value in values) / len(values)
    assert float(on_ranks(statistics.share, mask, learner < -1)) == pytest.approx(low)
    assert float(statistics.share(mask & False, learner < -1)) == 0.0


def test_the_watch_for_synchronisations_sees_them():
    values, chosen = torch.ones(2), torch.tensor([True, False])
    with pytest.raises(AssertionError, match="waits for the device"), no_host_sync():
        values.sum().item()
    with pytest.raises(AssertionError, match="waits for the device"), no_host_sync():
        values + torch.tensor(1.0)
    with pytest.raises(AssertionError, match="mask"), no_host_sync():
        values[chosen]
