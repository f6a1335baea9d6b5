"""Two kernels of vLLM's batch-invariant mode whose bits depend on the batch after all, seen on an H200 with 0.26.

`fused_add_rms_norm` takes blocks of 1024 threads below 256 rows and of 256 from there on, and adds the squares in
another order in each. The sum of the residual stream is made first here and normed by the mode's own kernel.

FlashAttention 3 drops the causal mask of a call in which every sequence asks for one token, and with it takes blocks of
another number of keys where a head has other than 128 dimensions. It is told of two here, which is an upper bound.
"""

import os
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lit_qrl.rollout.vllm.patches.patch import Patch, Versions


def norm_of_the_sum(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return vLLM's `rms_norm_batch_invariant`, which norms the sum with a residual as it norms everything else."""

    def norm(input: Tensor, weight: Tensor | None, eps: float = 1e-6, residual: Tensor | None = None) -> Any:
        if residual is None:
            return original(input, weight, eps)
        total = input + residual
        return original(total, weight, eps), total

    return norm


def never_single(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return vLLM's `flash_attn_varlen_func`, which computes single tokens of sequences as it does several."""

    def attend(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("max_seqlen_q") == 1 and os.environ.get("VLLM_BATCH_INVARIANT") == "1":
            kwargs["max_seqlen_q"] = 2
        return original(*args, **kwargs)

    return attend


PATCH = Patch(
    __name__,
    Versions("0.26", "0.27"),
    "the mode's norm does not depend on the number of rows, and FlashAttention not on the length of queries",
    changes={
        "vllm.model_executor.layers.layernorm:rms_norm_batch_invariant": norm_of_the_sum,
        "vllm.v1.attention.backends.flash_attn:flash_attn_varlen_func": never_single,
    },
    device="cuda",
)
