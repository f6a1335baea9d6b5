import pytest
import torch

from lit_qrl.callbacks.veto import TokenVeto
from lit_qrl.errors import ConfigError
from tests.callbacks.corrections import context
from tests.functional.helpers import no_host_sync


def test_one_catastrophic_token_drops_its_sequence():
    given = context()
    with no_host_sync():
        got = TokenVeto().correct(None, None, given)
    # Row 4 holds the log-ratio of −30, row 2 the one of +30.
    assert [bool((k | ~m).all()) for k, m in zip(got.keep, given.mask, strict=True)] == [i != 4 for i in range(8)]
    assert not (got.keep[4] & given.mask[4]).any()
    assert float(got.metrics["correction/vetoed_sequences"]) == pytest.approx(1 / 7)


def test_counted_rejections_become_weights_of_zero():
    got = TokenVeto(count_rejected=True).correct(None, None, context())
    assert got.keep is None
    assert float(got.weights[4, 0]) == 0


def test_equal_policies_are_all_kept():
    assert TokenVeto(0.999).correct(None, None, context(torch.float32, equal=True)).keep.all()


@pytest.mark.parametrize("threshold", [0.0, 1.0, -9.2, 2.0])
def test_bad_input_is_refused_at_construction(threshold):
    with pytest.raises(ConfigError, match="threshold"):
        TokenVeto(threshold)
