"""What an engine's weights are before the first publish: numbers that keep its own warm-up finite.

vLLM fills them at random and leaves packed codes as the memory was. It then draws tokens to warm up, on a GPU from 0.26
on; the inverse of a random global scale (NVFP4) makes logits NaN there, the token drawn from them lies outside the
vocabulary, and the device is lost to the process before anything was published.
"""

from typing import Any

import torch
from torch import Tensor

from lit_qrl.rollout.vllm.patches.patch import Patch, Versions

NUMBER = 2.0**-6
"""Of every weight and scale, exact in all dtypes; a scale's inverse is 64."""


@torch.no_grad()
def fill(param: Tensor, *args: Any, **named: Any) -> None:
    """Fill a parameter, integers with zeros.

    >>> fill(codes := torch.ones(2, dtype=torch.uint8)); fill(scale := torch.zeros(2, dtype=torch.float8_e4m3fn))
    >>> codes.tolist(), scale.tolist()
    ([0, 0], [0.015625, 0.015625])
    """
    if param.device.type != "meta":  # those are filled when they get memory
        param.data.fill_(NUMBER if param.is_floating_point() else 0)


_LOADER = "vllm.model_executor.model_loader"
PATCH = Patch(
    __name__,
    Versions("0.26"),
    "dummy weights of every format give finite logits",
    {
        f"{_LOADER}.{name}:initialize_single_dummy_weight": lambda original: fill
        for name in ("dummy_loader", "weight_utils")
    },
)
