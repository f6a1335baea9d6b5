"""The formats that hold plain floating point: bf16, fp16, fp32."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_qrl.formats.base import NumberFormat, QuantizedWeight, expect_shape
from lit_qrl.formats.numerics import magnitude, require_finite


class Dense(NumberFormat):
    """A plain dtype; a GEMM multiplies in the dtype of its input."""

    dtype: ClassVar[torch.dtype]
    suffixes: ClassVar[tuple[str, ...]] = ("weight",)

    @property
    def packs(self) -> bool:
        return False

    @torch.no_grad()
    def quantize(self, weight: Tensor, shared_amax: Tensor | None = None) -> QuantizedWeight:
        """Return the weight in this dtype.

        >>> BF16().quantize(torch.tensor([[1.001, 2.0]])).codes.tolist()
        [[1.0, 2.0]]
        """
        codes = weight.detach().to(self.dtype)
        require_finite(magnitude(codes))
        return QuantizedWeight(codes, None, None, self, (weight.shape[0], weight.shape[1]))

    def dequantize(self, q: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
        return q.codes.to(dtype)

    def load(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantizedWeight:
        """Return the weight as it came, of any plain dtype."""
        return expect_shape(QuantizedWeight(tensors["weight"], None, None, self, shape), shape)

    def quantization_config(self, ignore: Sequence[str] = ("lm_head",)) -> dict[str, Any]:
        """Return an empty dict: a plain checkpoint has no `quantization_config`."""
        return {}


@dataclass(frozen=True)
class BF16(Dense):
    """bfloat16."""

    name: ClassVar[str] = "bf16"
    bits_per_weight: ClassVar[float] = 16.0
    dtype: ClassVar[torch.dtype] = torch.bfloat16


@dataclass(frozen=True)
class FP16(Dense):
    """float16; a weight beyond ±65504 is refused."""

    name: ClassVar[str] = "fp16"
    bits_per_weight: ClassVar[float] = 16.0
    dtype: ClassVar[torch.dtype] = torch.float16


@dataclass(frozen=True)
class FP32(Dense):
    """float32."""

    name: ClassVar[str] = "fp32"
    bits_per_weight: ClassVar[float] = 32.0
    dtype: ClassVar[torch.dtype] = torch.float32


@dataclass(frozen=True)
class MultipliedOut(BF16):
    """bfloat16 whose numbers are those that the codes of another format stand for.

    A sampler that holds it multiplies by what a learner in that format does, by any kernel for plain weights.

    Args:
        of: that format, of weights alone.

    >>> from lit_qrl.formats.int4_group import Int4Group
    >>> sent = MultipliedOut(Int4Group(8))
    >>> q = sent.quantize(torch.tensor([[7.5, -7.5, 1.4, 0.4, 0.0, 0.0, 0.0, 0.0]]))
    >>> [(name, tensor.tolist()) for name, tensor in sent.export(q, "layer")]
    [('layer.weight', [[7.0, -8.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]])]
    """

    of: NumberFormat

    @property
    def numbers(self) -> NumberFormat:
        return self.of

    @property
    def shares_amax(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.of.shares_amax

    def quantize(self, weight: Tensor, shared_amax: Tensor | None = None) -> QuantizedWeight:
        return self.of.quantize(weight, shared_amax)

    def dequantize(self, q: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
        return super().dequantize(q, dtype) if q.format == self else self.of.dequantize(q, dtype)

    def export(self, q: QuantizedWeight, name: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{name}.weight", self.dequantize(q, self.dtype)
