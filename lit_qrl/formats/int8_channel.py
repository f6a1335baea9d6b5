"""INT8 with one scale per output channel of the weight and one per token."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_qrl.formats.kernels import activations, gemm
from lit_qrl.formats.numerics import INT8_STEPS, with_bias
from lit_qrl.formats.scaled import Scaled

_MIN, _MAX = -128, 127


@dataclass(frozen=True)
class Int8Channel(Scaled):
    """Signed 8-bit weights with a scale amax/127.5 per output channel, "out 1"; activations INT8, a scale per token.

    >>> q = Int8Channel().quantize(torch.tensor([[127.5, -127.5, 1.4], [0.0, 0.0, 0.0]]))
    >>> q.codes.tolist()
    [[127, -128, 1], [0, 0, 0]]
    """

    name: ClassVar[str] = "int8_channel"
    rows_together: ClassVar[int | None] = 1
    kind = "int"
    steps = INT8_STEPS

    def encode(self, quotient: Tensor) -> Tensor:
        return quotient.clamp_(_MIN, _MAX).round_().to(torch.int8)

    def has_gemm(self, device: torch.device, shape: tuple[int, int]) -> bool:
        return gemm.int8_gemm(device, shape)

    def multiply(self, x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        rounded, token_scale = activations.int8_rounded(x.reshape(-1, x.shape[-1]))
        product = gemm.int_mm(rounded.to(torch.int8), codes)
        return with_bias(product.float().mul_(token_scale).mul_(scale.view(1, -1)), bias, x.dtype)

    def emulate(self, rows: Tensor, weight: Tensor) -> Tensor:
        rounded, token_scale = activations.int8_rounded(rows)
        return F.linear(rounded, weight).mul_(token_scale)

    def dequantized_input(self, x: Tensor) -> Tensor:
        rounded, token_scale = activations.int8_rounded(x.reshape(-1, x.shape[-1]))
        return rounded.mul_(token_scale).to(x.dtype).view(x.shape)
