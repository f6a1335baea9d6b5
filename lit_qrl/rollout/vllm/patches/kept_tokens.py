"""vLLM's first model runner returns log-probs of all words or of the k likeliest, not of those that it could draw.

A request that asks for all of them here gets those of the words that `top_p` and `top_k` left, as many as the largest
set of the step has: the others are at −∞, and 150,000 of each token would have to go to the host. vLLM's own mask of
them needs its second model runner, which a CPU without Triton lacks, and which with it neither draws greedily nor
scores.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lit_qrl.rollout.vllm.patches.patch import Patch, Versions

ALL = -1
"""What a request gives as its number of log-probs to get those of the words that it could draw."""


def _of_those_left(original: Callable[..., Any]) -> Callable[..., Any]:
    def gather(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:
        if num_logprobs >= logprobs.shape[-1]:
            left = (logprobs > float("-inf")).sum(dim=-1)
            num_logprobs = max(int(left.max()), 1) if len(left) else 1
        return original(logprobs, num_logprobs, token_ids)

    return gather


PATCH = Patch(
    __name__,
    Versions("0.26"),
    "return_sampling_mask works beside greedy requests and without top_k in every model runner",
    {"vllm.v1.sample.sampler:Sampler.gather_logprobs": _of_those_left},
    ["vllm.logprobs:FlatLogprobs.start_indices"],
)
