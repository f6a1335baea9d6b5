import pytest
import torch

from lit_qrl.functional import _statistics as statistics
from tests.functional.helpers import Ranks, no_host_sync, rows


def test_largest_over_ranks():
    learner, _, mask, _ = rows()
    values = [float(v) for row, m in zip(learner, mask, strict=True) for v in row[m]]
    for part in Ranks(2).run(lambda r, f: statistics.largest(mask[r::2], learner[r::2], f)):
        assert float(part) == max(values)


def test_share_over_ranks():
    learner, _, mask, _ = rows()
    hit = learner < -1
    values = [float(v) < -1 for row, m in zip(learner, mask, strict=True) for v in row[m]]
    for part in Ranks(2).run(lambda r, f: statistics.share(mask[r::2], hit[r::2], f)):
        assert float(part) == pytest.approx(sum(values) / len(values))
    assert float(statistics.share(mask & False, hit)) == 0.0


def test_the_watch_for_synchronisations_sees_them():
    values, chosen = torch.ones(2), torch.tensor([True, False])
    with pytest.raises(AssertionError, match="waits for the device"), no_host_sync():
        values.sum().item()
    with pytest.raises(AssertionError, match="waits for the device"), no_host_sync():
        values + torch.tensor(1.0)
    with pytest.raises(AssertionError, match="mask"), no_host_sync():
        values[chosen]
