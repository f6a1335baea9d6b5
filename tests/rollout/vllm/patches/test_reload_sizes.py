import logging

import pytest

from lit_qrl.rollout.vllm.patches.reload_sizes import PATCH, nothing


def test_nothing_is_added_up_and_nobody_warned(fake, caplog):
    name = "vllm.model_executor.model_loader.reload.layerwise"
    package = fake("vllm.model_executor.model_loader.reload")
    fake("vllm"), fake("vllm.model_executor"), fake("vllm.model_executor.model_loader")
    logger = logging.getLogger("sizes of a reload")
    package.layerwise = fake(name, logger=logger, get_info_size=len)
    for _ in range(2):
        PATCH.apply((0, 26, 0))
    assert package.layerwise.get_info_size([1, 2, 3]) == 0
    assert len(logger.filters) == 1
    logger.warning("Allocating %.1f MB of device memory to buffers to load %s layers.", 0.0, "[]")
    logger.warning("Something else")
    assert caplog.messages == ["Something else"]


def test_a_layer_has_no_size():
    assert nothing(len)([1, 2, 3]) == 0


@pytest.mark.vllm
def test_it_fits_where_it_is_not_needed():
    from vllm.model_executor.model_loader.reload import layerwise

    (symbol,) = PATCH.changes
    assert hasattr(layerwise, symbol.partition(":")[2])
