"""A Triton kernel of a sampler's step: residual sum and RMS norm in one.

Import it only where Triton and a CUDA device are. Results are rounded where the modules of transformers round; a norm's
mean is summed in another order, which changes its last bit at times.
"""

# Kernels are compiled from their source and launched with arguments that their Python signature does not have.
# pyright: reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST = 16384
"""The widest row that a program of the norm holds."""


@triton.jit
def _norm_kernel(x, residual, weight, y, k, eps, ADD: tl.constexpr, SIZE: tl.constexpr):
    """One row: the sum goes to where the residual stood."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    inside = column < k
    at = row * k + column
    dtype: tl.constexpr = x.dtype.element_ty
    wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        total = (wide + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        tl.store(residual + at, total, mask=inside)
        wide = total.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / k + eps)
    scaled = (wide * inverse).to(dtype).to(tl.float32)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, (gain * scaled).to(dtype), mask=inside)


def norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Return `weight · h / sqrt(mean h² + ε)` of h = x + residual, "... k"; h is written over the residual.

    Args:
        x: "... k", contiguous.
        residual: "... k", contiguous; None stands for zeros, and nothing is written.
        weight: " k".
        eps: ε.
    """
    k = x.shape[-1]
    y = torch.empty_like(x)
    size = triton.next_power_of_2(k)
    rows, warps = x.numel() // k, min(max(size // 512, 1), 16)
    _norm_kernel[(rows,)](
        x, x if residual is None else residual, weight, y, k, eps, residual is not None, size, num_warps=warps
    )
    return y
