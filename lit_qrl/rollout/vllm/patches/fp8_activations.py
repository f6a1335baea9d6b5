"""The CPU build lacks the FP8 quantization of activations; here it is in plain torch."""

from typing import Any

import torch
from torch import Tensor

from lit_qrl.rollout.vllm.patches.patch import Patch, Versions


def scaled_fp8_quant(
    input: Tensor,
    scale: Tensor | None = None,
    num_token_padding: int | None = None,
    scale_ub: Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
    output: Tensor | None = None,
    group_shape: Any = None,
) -> tuple[Tensor, Tensor]:
    """Return E4M3 codes of activations and their scale, under vLLM's name and arguments.

    >>> codes, scale = scaled_fp8_quant(torch.tensor([[1.0, -448.0]]))
    >>> codes.float().tolist(), scale.tolist()
    ([[1.0, -448.0]], [1.0])
    """
    limit = torch.finfo(torch.float8_e4m3fn).max
    x = input.float()
    if scale is None:
        amax = x.abs().amax(dim=-1, keepdim=True) if use_per_token_if_dynamic else x.abs().amax().reshape(1)
        scale = (amax / limit).clamp_min(torch.finfo(torch.float32).tiny)
    factor = scale.float()
    if factor.ndim == 2 and factor.numel() > 1:
        factor = factor.repeat_interleave(x.shape[0] // factor.shape[0], dim=0)
        factor = factor.repeat_interleave(x.shape[1] // factor.shape[1], dim=1)
    codes = (x / factor).clamp(-limit, limit).to(torch.float8_e4m3fn)
    return (codes if output is None else output.copy_(codes)), scale


PATCH = Patch(
    __name__,
    Versions("0.26"),
    "the CPU build has static_scaled_fp8_quant and its dynamic forms",
    {"vllm._custom_ops:scaled_fp8_quant": lambda original: scaled_fp8_quant},
    device="cpu",
)
