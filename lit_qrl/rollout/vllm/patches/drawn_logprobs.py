"""vLLM's second runner scores drawn tokens with one program a sequence, which walks through all words three times.

With 128 sequences and 152k words that leaves a GPU of 132 multiprocessors waiting for memory: 300 dependent loads one
behind another. Ours cuts each row into parts that are summed side by side (`rollout/drawn_triton.py`). Where likeliest
words or given ones are asked for, or bits must not hang on the batch, vLLM's own kernels stay.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lit_qrl.rollout.vllm.patches.patch import Patch, Versions


def _of_drawn_alone(original: Callable[..., Any]) -> Callable[..., Any]:
    def compute_topk_scores(
        logits: Tensor, num_logprobs: int, sampled_token_ids: Tensor, cu_num_logits: Any = None, **named: Any
    ) -> Any:
        others = num_logprobs > 0 or named.get("max_per_req_token_ids", 0) > 0 or named.get("logits_mode", False)
        apart = isinstance(cu_num_logits, Tensor)  # proposed tokens, of which only the device knows how many
        if others or apart or logits.device.type != "cuda" or logits.stride(1) != 1 or _invariant():
            return original(logits, num_logprobs, sampled_token_ids, cu_num_logits, **named)
        from vllm.v1.outputs import LogprobsTensors

        from lit_qrl.rollout.drawn_triton import scored

        tokens = sampled_token_ids.view(-1)
        logprobs, ranks = scored(logits, tokens)
        return LogprobsTensors(
            logprob_token_ids=tokens.unsqueeze(-1),
            logprobs=logprobs.unsqueeze(-1),
            selected_token_ranks=ranks,
            cu_num_generated_tokens=cu_num_logits,
        )

    return compute_topk_scores


def _invariant() -> bool:
    from vllm import envs

    return bool(envs.VLLM_BATCH_INVARIANT)


PATCH = Patch(
    __name__,
    Versions("0.26"),
    "vLLM scores a drawn token with several programs a sequence",
    {"vllm.v1.worker.gpu.sample.sampler:compute_topk_scores": _of_drawn_alone},
    device="cuda",
)
