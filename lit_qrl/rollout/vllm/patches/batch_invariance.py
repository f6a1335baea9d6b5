"""The norm of vLLM's batch-invariant mode whose bits depend on the batch after all, seen on an H200 with 0.26.

`fused_add_rms_norm` takes blocks of 1024 threads below 256 rows and of 256 from there on, and adds the squares in
another order in each. The sum of the residual stream is made first here and normed by the mode's own kernel.
"""

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


PATCH = Patch(
    __name__,
    Versions("0.26", "0.27"),
    "the bits of the mode's norm do not depend on the number of rows",
    changes={"vllm.model_executor.layers.layernorm:rms_norm_batch_invariant": norm_of_the_sum},
    device="cuda",
)
