"""vLLM cuts three arrays for the log-prob of each drawn token and goes through each as if it held many.

At 128 sequences that is 0.7 ms of the host in every step, while a step of a small or quantized model takes the GPU
four. Where nothing but the drawn token's log-prob is asked for, a step's arrays become lists at once, and a request
appends one number of each.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from lit_qrl.rollout.vllm.patches.patch import Patch, Versions


class One(tuple):
    """Word, log-prob and rank of one drawn token."""

    __slots__ = ()


def _lists(original: Callable[..., Any]) -> Callable[..., Any]:
    kinds: dict[type, type] = {}

    def tolists(self: Any, *args: Any, **named: Any) -> Any:
        arrays = original(self, *args, **named)
        words, logprobs, ranks, starts = arrays
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":  # another process knows nothing of `One`
            return arrays
        if starts is not None or logprobs.ndim != 2 or logprobs.shape[1] != 1:
            return arrays
        if type(arrays) not in kinds:
            kinds[type(arrays)] = _by_number(type(arrays))
        kind = kinds[type(arrays)]
        made = kind(*arrays)
        made.ones = list(map(One, zip(words[:, 0].tolist(), logprobs[:, 0].tolist(), ranks.tolist(), strict=True)))
        return made

    return tolists


def _by_number(arrays: type) -> type:
    """Return a class of vLLM's arrays that gives a request's only token as `One`."""

    class ByNumber(arrays):
        ones: list[One]

        def slice_request(self, req_idx: int, num_positions: int) -> Any:
            if num_positions == 1:
                return self.ones[req_idx]
            return super().slice_request(req_idx, num_positions)

    return ByNumber


def _appended(original: Callable[..., None]) -> Callable[..., None]:
    def _update_sample_logprobs(self: Any, logprobs_lists: Any) -> None:
        one, to = type(logprobs_lists) is One, self.logprobs
        if one and self.tokenizer is None and hasattr(to, "append_fast"):
            word, logprob, rank = logprobs_lists
            self.cumulative_logprob += logprob
            to.start_indices.append(len(to.logprobs))
            to.token_ids.append(word)
            to.logprobs.append(logprob)
            to.ranks.append(rank)
            to.decoded_tokens.append(None)
            to.end_indices.append(len(to.logprobs))
        elif one:
            word, logprob, rank = logprobs_lists
            original(self, (np.array([[word]]), np.array([[logprob]]), np.array([rank]), None))
        else:
            original(self, logprobs_lists)

    return _update_sample_logprobs


PATCH = Patch(
    __name__,
    Versions("0.26"),
    "vLLM takes the log-probs of drawn tokens out of a step's arrays at once",
    {
        "vllm.v1.outputs:LogprobsTensors.tolists": _lists,
        "vllm.v1.engine.logprobs:LogprobsProcessor._update_sample_logprobs": _appended,
    },
    needs=("vllm.v1.outputs:LogprobsLists.slice_request", "vllm.logprobs:FlatLogprobs.append_fast"),
)
