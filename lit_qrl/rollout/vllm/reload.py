"""The bracket around vLLM's own reload of weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lit_qrl.rollout.vllm.patches.base_without_adapters import without_adapters


@contextmanager
def reloading(llm: Any, model: nn.Module) -> Iterator[None]:
    """Bracket a reload: modules take checkpoint tensors inside, and hold repacked ones in the old memory after.

    Leaving by an exception also closes the reload, so that layers which got nothing have their old weights back.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import reload

    config = llm.llm_engine.vllm_config
    with set_current_vllm_config(config), without_adapters(model), torch.no_grad():
        reload.initialize_layerwise_reload(model)
        try:
            yield
        finally:
            reload.finalize_layerwise_reload(model, config.model_config)
