"""A Triton kernel of Adam on fp32 weights in two parts: bf16 numbers, and the bits beyond them; import where Triton is.

It reads and writes every number once, where plain operations make some three dozen passes over memory.
"""

# Kernels are compiled from their source and launched with arguments that their Python signature does not have.
# pyright: reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from lit_qrl.functional._launch import pieces, remembered

SIZE = 4096
"""Numbers that a program takes."""
WARPS = 8


@remembered
@triton.jit
def _adam_kernel(weight, low, grad, average, square, settings, count, SIZE: tl.constexpr):
    """A step of Adam on numbers joined and taken apart in passing."""
    kept, first, second = tl.load(settings), tl.load(settings + 1), tl.load(settings + 2)
    rate, root, eps, penalty = (
        tl.load(settings + 3), tl.load(settings + 4), tl.load(settings + 5), tl.load(settings + 6)
    )  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < count
    bits = (tl.load(weight + at, mask=inside, other=0).to(tl.int32) << 16) + tl.load(low + at, mask=inside, other=0).to(
        tl.int32
    )
    master = bits.to(tl.float32, bitcast=True)
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) + penalty * master
    m = tl.load(average + at, mask=inside, other=0.0)
    v = tl.load(square + at, mask=inside, other=0.0)
    m += first * (g - m)
    v += second * (g * g - v)
    tl.store(average + at, m, mask=inside)
    tl.store(square + at, v, mask=inside)
    master = master * kept - rate * (m / (tl.sqrt(v) / root + eps))
    bits = master.to(tl.int32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)  # one NaN for all
    upper = (bits + 0x8000) >> 16
    tl.store(weight + at, upper.to(tl.int16), mask=inside)
    tl.store(low + at, (bits - (upper << 16)).to(tl.int16), mask=inside)


def adam_settings(
    device: torch.device, *, step: float, lr: float, betas: tuple[float, float], eps: float, weight_decay: float,
    decoupled: bool,
) -> Tensor:  # fmt: skip
    """Return what `adam` reads of a step, fp32 on the device: with numbers of its own each step would start anew.

    Args:
        device: of the weights.
        step: t, from 1.
        lr: the rate.
        betas: β₁ and β₂.
        eps: ε.
        weight_decay: λ.
        decoupled: as in AdamW.
    """
    kept, penalty = (1 - lr * weight_decay, 0.0) if decoupled else (1.0, weight_decay)
    rate, root = lr / (1 - betas[0] ** step), (1 - betas[1] ** step) ** 0.5
    made = torch.tensor([kept, 1 - betas[0], 1 - betas[1], rate, root, eps, penalty], dtype=torch.float32)
    # from page-locked memory, for which nothing waits
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made


def adam(weight: Tensor, low: Tensor, grad: Tensor, average: Tensor, square: Tensor, settings: Tensor) -> None:
    """Take a step of Adam(W) on the fp32 weights of which `weight` and `low` are the parts, in place.

    m ← m + (1 − β₁)(g − m);  v ← v + (1 − β₂)(g² − v);  w ← (1 − lr·λ) w − lr/(1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε)

    with g + λ w in place of g, and no factor at w, where the decay is not decoupled.

    Args:
        weight: bf16, contiguous; autograd does not see the write.
        low: int16, of its shape, contiguous.
        grad: bf16 or fp32, of its shape, contiguous.
        average: m, fp32, contiguous.
        square: v, fp32, contiguous.
        settings: that `adam_settings` made.
    """
    count = weight.numel()
    tensors = weight.view(torch.int16), low, grad, average, square, settings
    _adam_kernel[(pieces(count, SIZE),)](*tensors, count, SIZE, num_warps=WARPS)
