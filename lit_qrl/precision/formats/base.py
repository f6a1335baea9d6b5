"""The contract of a number format: how a weight becomes codes and scales, and how a GEMM runs on them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_qrl.types import QuantizedWeight


class NumberFormat(ABC):
    """A number format for weights, and where it says so for activations.

    Subclasses are frozen dataclasses: hashable, without state. One class serves learner, sampler and export.
    """

    name: ClassVar[str]
    quantizes_activations: ClassVar[bool] = False
    shares_amax: ClassVar[bool] = False
    """True when layers that the engine fuses (q, k, v; gate, up) must share one amax (a per-tensor or global scale)."""

    @property
    @abstractmethod
    def bits_per_weight(self) -> float:
        """Bits of storage per weight, scales included (for a large layer)."""

    def check(self, name: str, shape: tuple[int, int]) -> None:  # noqa: B027
        """Raise `ValueError` naming the layer, the shape and the remedy where the shape does not fit."""

    @abstractmethod
    def quantize(self, weight: Tensor, shared_amax: Tensor | None = None) -> QuantizedWeight:
        """Return codes and scales of `weight` ("out in"); `shared_amax` replaces its own where `shares_amax`."""

    @abstractmethod
    def dequantize(self, q: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight ("out in") that the codes stand for."""

    @abstractmethod
    def linear(self, x: Tensor, q: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
        """Return `x @ W.T + bias` in the format's own arithmetic: "... in" -> "... out", dtype of `x`."""

    @abstractmethod
    def export(self, q: QuantizedWeight, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the checkpoint tensors of the layer `name` (without `.weight`), as vLLM's loader reads them."""

    @abstractmethod
    def load(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantizedWeight:
        """Return the weight from its exported tensors, keyed by suffix (`weight`, `weight_scale`, …)."""

    @abstractmethod
    def quantization_config(self, ignore: Sequence[str] = ("lm_head",)) -> dict[str, Any]:
        """Return the `quantization_config` of a Hugging Face `config.json`."""
