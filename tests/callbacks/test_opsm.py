import pytest
import torch

from lit_qrl.callbacks.opsm import OffPolicySequenceMask
from lit_qrl.errors import ConfigError
from lit_qrl.functional.rejection import opsm_keep
from tests.callbacks.corrections import context
from tests.functional.helpers import no_host_sync


def test_drops_negative_sequences_that_drifted():
    given = context(spread=1.0)
    with no_host_sync():
        got = OffPolicySequenceMask(0.05).correct(None, None, given)
    assert torch.equal(got.keep, opsm_keep(given.log_ratio, given.mask, given.advantages, 0.05))
    dropped = (~got.keep).any(1)
    assert dropped.any()
    assert (given.advantages[dropped] < 0).all()
    assert float(got.metrics["correction/off_policy_sequences"]) == pytest.approx(int(dropped.sum()) / 7)


def test_counted_rejections_become_weights_of_zero():
    given = context(spread=1.0)
    plain = OffPolicySequenceMask(0.05).correct(None, None, given)
    counted = OffPolicySequenceMask(0.05, count_rejected=True).correct(None, None, given)
    assert torch.equal(counted.weights, plain.keep.double())
    assert counted.keep is None


@pytest.mark.parametrize("delta", [0.0, -0.1])
def test_bad_input_is_refused_at_construction(delta):
    with pytest.raises(ConfigError, match="delta"):
        OffPolicySequenceMask(delta)
