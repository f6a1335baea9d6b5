"""On CPU vLLM packs a copy for the output head's GEMM, and a reload of the embedding alone leaves that as it was."""

from typing import Any

import torch
from torch import nn

from lit_qrl.rollout.vllm.patches.patch import Patch, Versions


def pack_again(llm: Any, module: nn.Module) -> None:
    """Make a module that shares its parameters with a reloaded one pack them again."""
    from vllm.config import set_current_vllm_config

    method: Any = getattr(module, "quant_method", None)
    if not torch.cuda.is_available() and method is not None and hasattr(module, "cpu_linear"):
        with set_current_vllm_config(llm.llm_engine.vllm_config):
            method.process_weights_after_loading(module)


_LAYERS = "vllm.model_executor.layers"
PATCH = Patch(
    __name__,
    Versions("0.26"),
    "a reload packs tied parameters for each of their modules",
    needs=[
        f"{_LAYERS}.utils:dispatch_cpu_unquantized_gemm.cpu_linear",
        f"{_LAYERS}.vocab_parallel_embedding:UnquantizedEmbeddingMethod.process_weights_after_loading",
    ],
    device="cpu",
)
