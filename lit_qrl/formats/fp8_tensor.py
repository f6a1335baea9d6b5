"""FP8 E4M3 with one scale per weight tensor."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lit_qrl.errors import ConfigError
from lit_qrl.formats.base import QuantizedWeight
from lit_qrl.formats.numerics import magnitudes, require_finite, scale_from_amax
from lit_qrl.formats.scaled import ScaledE4M3


@dataclass(frozen=True)
class FP8Tensor(ScaledE4M3):
    """E4M3 weights with one scale, amax/448, " 1"; activations E4M3, quantized on the fly.

    Layers that the engine fuses share the amax, since vLLM re-quantizes a fused weight to its largest scale.

    Args:
        activations: one scale per call ("tensor"), or one per token, as vLLM takes beside this weight scale.

    >>> import torch
    >>> q = FP8Tensor().quantize(torch.tensor([[448.0, -1.1], [3.0, 0.0]]))
    >>> q.codes.float().tolist(), q.scales.tolist()
    ([[448.0, -1.125], [3.0, 0.0]], [1.0])
    """

    activations: Literal["tensor", "token"] = "tensor"

    name: ClassVar[str] = "fp8_tensor"
    shares_amax: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.activations not in ("tensor", "token"):
            raise ConfigError(
                "The activations of fp8_tensor are unknown.", expected="tensor or token", given=repr(self.activations)
            )

    @property
    def per_token(self) -> bool:
        return self.activations == "token"

    def extent(self, shape: tuple[int, int]) -> tuple[int, int]:
        return shape

    def scale_shape(self, shape: tuple[int, int]) -> tuple[int, ...]:
        return (1,)

    @torch.no_grad()
    def quantize_stack(self, weights: Tensor, shared_amax: Tensor | None = None) -> QuantizedWeight:
        amaxes = magnitudes(weights)
        require_finite(amaxes)
        if shared_amax is not None:
            amaxes = shared_amax.to(device=weights.device, dtype=weights.dtype)
        scales = scale_from_amax(amaxes, self.steps).unsqueeze(1)
        codes = self.encode(weights.detach() / scales.unsqueeze(2))
        return QuantizedWeight(codes, scales, None, self, (weights.shape[1], weights.shape[2]))

    def granularity(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"strategy": "tensor"}, {"strategy": self.activations}
