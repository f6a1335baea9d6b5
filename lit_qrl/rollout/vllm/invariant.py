"""vLLM's batch-invariant mode: what it needs, what of it the learner must not notice, and its kernels."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lit_qrl.precision.vllm_kernels.exact import VLLMKernels


def prepare_environment() -> None:
    """Set what vLLM reads when it is first imported.

    Its second model runner keeps logits in bf16 when it divides them by a temperature; the first raises them to fp32,
    as the learner does.
    """
    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"


@contextmanager
def learner_left_alone() -> Iterator[None]:
    """Undo what the mode's start replaces for the whole process, where nothing of the sampler needs it.

    It replaces `torch.bmm` by a kernel without gradients, and `mean` over dimensions by one in fp32.
    """
    bmm = torch.bmm
    try:
        yield
    finally:
        torch.bmm = bmm


def kernels(model: Any) -> VLLMKernels:
    """Return the kernels of a live model.

    Args:
        model: vLLM's own.
    """
    rotary = model.model.layers[0].self_attn.rotary_emb
    return VLLMKernels(rotary)
