"""NVFP4 for weights and activations: a format for studies, which no engine of this project multiplies in."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_qrl.formats import NVFP4, PreparedWeight, register
from lit_qrl.formats.nvfp4 import BLOCK
from lit_qrl.formats.support import FormatSupport


@dataclass(frozen=True)
class NVFP4W4A4(NVFP4):
    r"""NVFP4 weights, and inputs in the same blocks of 16, whose fp32 scale is each token's own (W4A4).

    Kernels that ship give all tokens one fp32 scale, calibrated before; a token's own rounds no worse.

    Args:
        residual: share of a token's blocks whose rounding error r = x − Q(x) is quantized too and multiplied by the
            same weights, $y = (Q(x) + Q(S r)) \, Q(W)^T$: residual activation compensation (QUADS, arXiv:2607.15810).
            S keeps the blocks with the largest ‖r‖₂. At 1 nothing is chosen; the paper takes half of the channels, by
            a norm of r that was not at hand. Here each token chooses, so that no other changes its numbers.
    """

    residual: float = 0.0

    name: ClassVar[str] = "nvfp4_w4a4"
    quantizes_activations: ClassVar[bool] = True

    def apply(self, x: Tensor, prepared: PreparedWeight, bias: Tensor | None = None) -> Tensor:
        return F.linear(self.dequantized_input(x), prepared.operand, bias)

    @torch.no_grad()
    def dequantized_input(self, x: Tensor) -> Tensor:
        """Return the inputs as they are multiplied, in the shape and dtype of `x`.

        >>> NVFP4W4A4().dequantized_input(torch.tensor([[6.0, 5.1, 1.2, 0.2] + 12 * [0.0]]))[0, :4].tolist()
        [6.0, 6.0, 1.0, 0.0]
        """
        rows = x.reshape(-1, 1, x.shape[-1])
        once = self.dequantize_stack(self.quantize_stack(rows), x.dtype)
        if not self.residual:
            return once.view(x.shape)
        left = (rows - once).unflatten(-1, (-1, BLOCK))
        norms = left.float().norm(dim=-1)
        chosen = norms.topk(math.ceil(self.residual * norms.shape[-1])).indices
        left = left * torch.zeros_like(norms, dtype=x.dtype).scatter_(-1, chosen, 1.0).unsqueeze(-1)
        return (once + self.dequantize_stack(self.quantize_stack(left.flatten(-2)), x.dtype)).view(x.shape)


register(NVFP4W4A4, FormatSupport(audited=False, folders=False, folder_experts=()))
