"""NVFP4 for weights and activations: a format for studies, which no engine of this project multiplies in."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_qrl.formats import NVFP4, PreparedWeight, register
from lit_qrl.formats.support import FormatSupport


@dataclass(frozen=True)
class NVFP4W4A4(NVFP4):
    """NVFP4 weights, and inputs in the same blocks of 16, whose fp32 scale is each token's own (W4A4).

    Kernels that ship give all tokens one fp32 scale, calibrated before; a token's own rounds no worse.
    """

    name: ClassVar[str] = "nvfp4_w4a4"

    @property
    def quantizes_activations(self) -> bool:
        return True

    def apply(self, x: Tensor, prepared: PreparedWeight, bias: Tensor | None = None) -> Tensor:
        return F.linear(self.dequantized_input(x), prepared.operand, bias)

    @torch.no_grad()
    def dequantized_input(self, x: Tensor) -> Tensor:
        """Return the inputs as they are multiplied, in the shape and dtype of `x`.

        >>> NVFP4W4A4().dequantized_input(torch.tensor([[6.0, 5.1, 1.2, 0.2] + 12 * [0.0]]))[0, :4].tolist()
        [6.0, 6.0, 1.0, 0.0]
        """
        rows = x.reshape(-1, 1, x.shape[-1])
        return self.dequantize_stack(self.quantize_stack(rows), x.dtype).view(x.shape)


register(NVFP4W4A4, FormatSupport(audited=False, folders=False, folder_experts=()))
