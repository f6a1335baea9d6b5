"""On a CPU vLLM divides the logits of proposed tokens by temperatures that it never wrote.

What gives each proposed token the settings of its request takes whole numbers; of others it fills a copy that is
dropped, so that the log-probs of such tokens, and whether they are accepted, come from memory as it was found. Under
`top_k` a step without any proposed token fails beside that.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lit_qrl.rollout.vllm.patches.patch import Patch, Versions


def _of_any_dtype(original: Callable[..., Any]) -> Callable[..., Any]:
    def expand(
        output: Tensor,
        input_val: Tensor,
        cu_num_tokens: Tensor,
        replace_from: float,
        replace_to: float,
        *_: Any,
        **__: Any,
    ) -> None:
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        output.copy_(input_val.masked_fill(input_val == replace_from, replace_to).repeat_interleave(counts.long()))

    return expand


def _of_no_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    def keep(logits: Tensor, k: Tensor) -> Tensor:
        return original(logits, k) if len(logits) else logits

    return keep


PATCH = Patch(
    __name__,
    Versions("0.27"),
    "the CPU's expand_kernel writes floats",
    {
        "vllm.utils.cpu_triton_utils:_expand_kernel_impl": _of_any_dtype,
        "vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_only": _of_no_tokens,
    },
    device="cpu",
)
