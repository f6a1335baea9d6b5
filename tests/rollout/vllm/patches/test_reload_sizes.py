import logging

import pytest

from lit_qrl.rollout.vllm.patches.reload_sizes import PATCH, nothing, wanted


def test_nothing_is_added_up_and_nobody_warned():
    assert nothing(len)([1, 2, 3]) == 0
    said = "Allocating %.1f MB of device memory to buffers to load %s layers."
    assert not wanted(logging.LogRecord("vllm", logging.WARNING, "", 1, said, (0.0, "[]"), None))
    assert wanted(logging.LogRecord("vllm", logging.WARNING, "", 1, "Something else", (), None))


@pytest.mark.vllm
def test_it_fits_where_it_is_not_needed():
    from vllm.model_executor.model_loader.reload import layerwise

    (symbol,) = PATCH.changes
    assert hasattr(layerwise, symbol.partition(":")[2])
