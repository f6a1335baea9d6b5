import math

import pytest
import torch

from lit_qrl.callbacks.geometric import GeometricRejection
from lit_qrl.errors import ConfigError
from tests.callbacks.corrections import context
from tests.functional.helpers import listed, no_host_sync


def test_rejects_by_the_ratio_per_token():
    given = context()
    with no_host_sync():
        got = GeometricRejection(lower=0.8, upper=1.2).correct(None, None, given)
    rows = listed(given.log_ratio, given.mask)
    wanted = [not row or 0.8 <= math.exp(sum(row) / len(row)) <= 1.2 for row in rows]
    for i, kept in enumerate(wanted):
        assert (got.keep[i] | ~given.mask[i]).all() == kept
        assert (got.keep[i] & given.mask[i]).any() == (kept and bool(rows[i]))
    share = float(got.metrics["correction/geometric_rejected_sequences"])
    assert share == pytest.approx(wanted.count(False) / 7)
    assert got.weights is None


def test_counted_rejections_become_weights_of_zero():
    given = context()
    plain = GeometricRejection(upper=1.2, lower=None).correct(None, None, given)
    counted = GeometricRejection(upper=1.2, lower=None, count_rejected=True).correct(None, None, given)
    assert counted.keep is None
    assert torch.equal(counted.weights == 1, plain.keep)
    assert torch.equal(counted.weights == 0, ~plain.keep)


def test_equal_policies_are_all_kept():
    assert GeometricRejection(1.0, 1.0).correct(None, None, context(torch.float32, equal=True)).keep.all()


@pytest.mark.parametrize("options", [{"upper": 0.99}, {"lower": 1.001, "upper": 1.01}, {"lower": -1.0}])
def test_bad_input_is_refused_at_construction(options):
    with pytest.raises(ConfigError, match="GeometricRejection"):
        GeometricRejection(**options)
