"""Symmetric INT4 with a scale per group of inputs: W4A16, and W4A8 with FP8 or INT8 activations."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_qrl.errors import ConfigError
from lit_qrl.formats.base import NumberFormat, PreparedWeight, QuantizedWeight, compressed_tensors_config, expect_shape
from lit_qrl.formats.kernels import activations, dispatch
from lit_qrl.formats.numerics import (
    INT4_MAX,
    INT4_MIN,
    INT4_STEPS,
    pack_int4,
    require_finite,
    scale_from_amax,
    unpack_int4,
    with_bias,
)

_PER_INT32 = 8


@dataclass(frozen=True)
class Int4Group(NumberFormat):
    """Signed 4-bit weights with a scale amax/7.5 per `group_size` inputs of a row.

    Args:
        group_size: inputs that share a scale; a multiple of 8 that divides in_features.
        activations: None leaves them alone (W4A16); `fp8` and `int8` quantize them per token (W4A8).
    """

    group_size: int = 128
    activations: Literal["fp8", "int8"] | None = None

    name: ClassVar[str] = "int4_group"
    suffixes: ClassVar[tuple[str, ...]] = ("weight_packed", "weight_scale")
    rows_together: ClassVar[int | None] = 1
    scales_like_weight: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.group_size <= 0 or self.group_size % _PER_INT32:
            raise ConfigError(
                "The group_size of int4_group does not fit.",
                expected=f"a positive multiple of {_PER_INT32}",
                given=self.group_size,
                remedy="Engines take 32, 64 and 128.",
            )
        if self.activations not in (None, "fp8", "int8"):
            raise ConfigError(
                "The activations of int4_group are unknown.",
                expected="null, fp8 or int8",
                given=repr(self.activations),
            )

    @property
    def quantizes_activations(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.activations is not None

    @property
    def bits_per_weight(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return 4.0 + 16.0 / self.group_size

    @property
    def inputs_together(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.group_size

    @torch.no_grad()
    def quantize(self, weight: Tensor, shared_amax: Tensor | None = None) -> QuantizedWeight:
        """Return codes "out in/8" (eight per int32) and scales "out in/group" in the weight's dtype.

        >>> q = Int4Group(group_size=8).quantize(torch.tensor([[7.5, -7.5, 1.4, 0.4, 0.0, 0.0, 0.0, 0.0]]))
        >>> unpack_int4(q.codes).tolist(), q.scales.tolist()
        ([[7, -8, 1, 0, 0, 0, 0, 0]], [[1.0]])
        """
        self.check("This weight", (weight.shape[0], weight.shape[1]))
        made = dispatch.int4_groups(weight.detach(), self.group_size)
        if made is not None:
            require_finite(made[1])
            return QuantizedWeight(made[0], made[1], None, self, (weight.shape[0], weight.shape[1]))
        groups = weight.detach().unflatten(-1, (-1, self.group_size))
        amax = groups.abs().amax(dim=-1)
        require_finite(amax)
        scale = scale_from_amax(amax, INT4_STEPS)
        codes = (groups / scale.unsqueeze(-1)).clamp_(INT4_MIN, INT4_MAX).round_().to(torch.int8).flatten(-2)
        return QuantizedWeight(pack_int4(codes), scale, None, self, (weight.shape[0], weight.shape[1]))

    def dequantize(self, q: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
        return dispatch.packed_values(q, self.group_size, "INT4", dtype)

    def prepare(self, q: QuantizedWeight, dtype: torch.dtype) -> PreparedWeight:
        # bf16 holds every code of the activations, and tensor cores take it; a CPU is as fast in fp32 and exact
        low = self.activations is None or q.codes.is_cuda
        return PreparedWeight(self.dequantize(q, dtype if low else torch.float32))

    def apply(self, x: Tensor, prepared: PreparedWeight, bias: Tensor | None = None) -> Tensor:
        if self.activations is None:
            return F.linear(x, prepared.operand, bias)
        rounded, scale = self._rounded(x.reshape(-1, x.shape[-1]))
        out = F.linear(rounded.to(prepared.operand.dtype), prepared.operand).float().mul_(scale)
        out = with_bias(out, bias, x.dtype)
        return out.view(*x.shape[:-1], out.shape[-1])

    def dequantized_input(self, x: Tensor) -> Tensor:
        if self.activations is None:
            return x
        rounded, scale = self._rounded(x.reshape(-1, x.shape[-1]))
        return rounded.mul_(scale).to(x.dtype).view(x.shape)

    def _rounded(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes of "m in" in fp32, and their scales "m 1"."""
        if self.activations == "fp8":
            return activations.e4m3_rounded(rows, (1, rows.shape[1]))
        return activations.int8_rounded(rows)

    def export(self, q: QuantizedWeight, name: str) -> Iterator[tuple[str, Tensor]]:
        if self.activations == "int8":  # the engines' INT8 path reads one code per byte
            assert q.scales is not None
            yield f"{name}.weight", unpack_int4(q.codes)
            yield f"{name}.weight_scale", q.scales
            return
        yield from super().export(q, name)
        yield f"{name}.weight_shape", _described(q.shape)

    def load(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantizedWeight:
        codes = tensors["weight_packed"] if "weight_packed" in tensors else pack_int4(tensors["weight"])
        scales = tensors["weight_scale"].reshape(shape[0], shape[1] // self.group_size)
        q = QuantizedWeight(codes, scales, None, self, shape)
        return expect_shape(q, (shape[0], shape[1] // _PER_INT32))

    def quantization_config(self, ignore: Sequence[str] = ("lm_head",)) -> dict[str, Any]:
        types = {"fp8": "float", "int8": "int"}
        inputs = None
        if self.activations is not None:
            inputs = {"num_bits": 8, "type": types[self.activations], "strategy": "token"}
        return compressed_tensors_config(
            "int-quantized" if self.activations == "int8" else "pack-quantized",
            weights={"num_bits": 4, "type": "int", "strategy": "group", "group_size": self.group_size},
            activations=inputs,
            ignore=ignore,
        )


@lru_cache
def _described(shape: tuple[int, int]) -> Tensor:
    """Return a shape as the tensor that engines expect; one for all of a mixture's matrices, which nobody writes to."""
    with torch.inference_mode(False):
        return torch.tensor(shape, dtype=torch.int64)
