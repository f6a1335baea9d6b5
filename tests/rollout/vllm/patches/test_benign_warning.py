import logging

from lit_qrl.rollout.vllm.patches.benign_warning import PATCH


def test_only_the_warning_of_modules_without_weights_is_dropped(fake, caplog):
    name = "vllm.model_executor.model_loader.reload.layerwise"
    package = fake("vllm.model_executor.model_loader.reload")
    fake("vllm"), fake("vllm.model_executor"), fake("vllm.model_executor.model_loader")
    package.layerwise = fake(name, logger=logging.getLogger("a reload"))
    for _ in range(2):
        PATCH.apply((0, 26, 0))
    logger = logging.getLogger("a reload")
    assert len(logger.filters) == 1
    logger.warning("%s: Failed to load weights", "RotaryEmbedding")
    logger.warning("%s: something else", "RotaryEmbedding")
    assert caplog.messages == ["RotaryEmbedding: something else"]
