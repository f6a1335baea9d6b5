"""vLLM's first runner makes the noise of requests that have seeds one by one: at every step a launch for each.

Ours makes it in one kernel, from the request's seed and the number of tokens it has drawn, which its generator keeps.
So what is drawn with a seed is not what vLLM itself would draw with it; the distribution is the same.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lit_qrl.rollout.vllm.patches.patch import Patch, Versions

STEP = 4
"""By what a generator's offset grows with a draw: CUDA's generators count in fours."""


def _at_once(original: Callable[..., Any]) -> Callable[..., Any]:
    def random_sample(probs: Tensor, generators: dict[int, Any], *args: Any, **kwargs: Any) -> Tensor:
        fp64 = any(args) or any(kwargs.values())
        if not generators or fp64 or probs.dtype != torch.float32 or probs.device.type != "cuda":
            return original(probs, generators, *args, **kwargs)
        return probs.div_(noise_of(probs, generators)).argmax(dim=-1).view(-1)

    return random_sample


def noise_of(probs: Tensor, generators: dict[int, Any]) -> Tensor:
    """Return exponential noise "rows words": of rows with a generator from its seed, of the others from torch's own.

    Args:
        probs: "rows words".
        generators: by row; each is taken on by one draw.
    """
    from lit_qrl.rollout.noise_triton import exponential_rows, on_device

    noise = torch.empty_like(probs, memory_format=torch.contiguous_format)
    if len(generators) != len(probs):
        noise.exponential_()
    asked = list(generators.values())
    offsets = [one.get_offset() for one in asked]
    for one, offset in zip(asked, offsets, strict=True):
        one.set_offset(offset + STEP)
    numbers = [*generators, *(one.initial_seed() for one in asked), *(offset // STEP for offset in offsets)]
    rows, seeds, draws = on_device(numbers, probs.device).view(3, -1)
    exponential_rows(noise, rows, seeds, draws)
    return noise


PATCH = Patch(
    __name__,
    Versions("0.26"),
    "vLLM draws for all requests with seeds in one kernel",
    {"vllm.v1.sample.ops.topk_topp_sampler:random_sample": _at_once},
    device="cuda",
)
