"""The contract of a number format: how a weight becomes codes and scales, and how a GEMM runs on them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_qrl.errors import ConfigError


@dataclass(slots=True)
class QuantizedWeight:
    """A weight in a number format.

    Args:
        codes: the stored codes, in the layout of the checkpoint ("out in", or packed along "in").
        scales: one per tensor, row, group or block.
        global_scale: the second level of a two-level format (NVFP4), or None.
        format: the number format that made it.
        shape: (out, in) of the weight.
    """

    codes: Tensor
    scales: Tensor | None
    global_scale: Tensor | None
    format: "NumberFormat"
    shape: tuple[int, int]


@dataclass(slots=True)
class PreparedWeight:
    """A weight in the form that a GEMM takes, made once per publish and used by every call.

    Args:
        operand: the dequantized weight ("out in"), or the codes where the device multiplies those.
        scale: what the product is multiplied by where the operand holds codes.
        native: True when the device's own low-bit GEMM is used.
    """

    operand: Tensor
    scale: Tensor | None = None
    native: bool = False


class NumberFormat(ABC):
    """A number format for weights, and where it says so for activations.

    Subclasses are frozen dataclasses: hashable, without state. One class serves learner, sampler and export.
    """

    name: ClassVar[str]
    bits_per_weight: ClassVar[float]
    """Bits of storage per weight, scales included (for a large layer)."""
    quantizes_activations: ClassVar[bool] = False
    """True when the GEMM's left operand is quantized too."""
    suffixes: ClassVar[tuple[str, ...]] = ("weight", "weight_scale")
    """What a checkpoint calls codes, scales and global scale, as many as there are."""
    shares_amax: ClassVar[bool] = False
    """True when layers that the engine fuses (q, k, v; gate, up) must share one amax (a per-tensor or global scale)."""

    rows_together: ClassVar[int | None] = None
    """How many rows of a weight share scales, the first of them a multiple of that; None where all of them may."""

    inputs_together: ClassVar[int] = 1
    """How many inputs of a row share a scale, or lie in one word of codes: `in_features` is a multiple of that."""

    scales_like_weight: ClassVar[bool] = False
    """True when scales have the dtype of the weight, which is cast to the engine's before it is quantized."""

    def __str__(self) -> str:
        """Return name and settings as `formats.get` reads them, as in `int4_group:group_size=64`."""
        options = fields(self) if is_dataclass(self) else ()
        own = [(one.name, getattr(self, one.name)) for one in options if getattr(self, one.name) != one.default]
        given = ",".join(name if value is True else f"{name}={value}" for name, value in own)
        return f"{self.name}:{given}" if given else self.name

    @property
    def numbers(self) -> "NumberFormat":
        """The format whose numbers these are: itself, but where they go out multiplied out."""
        return self

    @property
    def packs(self) -> bool:
        """True when a frozen base may be held in it: its codes are smaller than the weight, and their GEMM is known."""
        return not self.quantizes_activations

    def dropped(self, q: QuantizedWeight) -> Tensor | float:
        """Return the magnitude below which an engine's kernel may take weights for 0: none, but for formats that say.

        Args:
            q: the weight.
        """
        return 0.0

    def check(self, name: str, shape: tuple[int, int]) -> None:
        """Raise `ConfigError` naming the layer, the shape and the remedy where the shape does not fit."""
        if shape[1] % self.inputs_together:
            smaller = "Choose a smaller group_size, or exclude" if hasattr(self, "group_size") else "Exclude"
            raise ConfigError(
                f"{name} does not fit {self.name}.",
                expected=f"in_features divisible by {self.inputs_together}",
                given=f"a weight of shape {tuple(shape)}",
                remedy=f"{smaller} the layer.",
            )

    @abstractmethod
    def quantize(self, weight: Tensor, shared_amax: Tensor | None = None) -> QuantizedWeight:
        """Return codes and scales of `weight` ("out in"); `shared_amax` replaces its own where `shares_amax`."""

    def quantize_stack(self, weights: Tensor, shared_amax: Tensor | None = None) -> QuantizedWeight:
        """Return what `quantize` returns of each matrix of a stack, to the bit, in tensors with one more dimension.

        All at once where no scale covers rows of two matrices, else one by one.

        Args:
            weights: "matrices out in".
            shared_amax: of each matrix, " matrices".
        """
        (count, rows, columns), together = weights.shape, self.rows_together
        if together is None or rows % together:
            each = [None] * count if shared_amax is None else shared_amax.unbind()
            made = [self.quantize(one.contiguous(), amax) for one, amax in zip(weights.unbind(), each, strict=True)]
            return _stacked(made)
        whole = self.quantize(weights.reshape(count * rows, columns))
        codes, scales = (
            None if part is None else part.unflatten(0, (count, -1)) for part in (whole.codes, whole.scales)
        )
        assert codes is not None
        return QuantizedWeight(codes, scales, None, self, (rows, columns))

    @abstractmethod
    def dequantize(self, q: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight ("out in") that the codes stand for."""

    def dequantize_stack(self, q: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return `dequantize` of each matrix of what `quantize_stack` made, "matrices out in", to the bit."""
        count, (rows, columns) = len(q.codes), q.shape
        if self.rows_together is None or rows % self.rows_together:
            none = [None] * count
            scales, wholes = (none if part is None else part.unbind() for part in (q.scales, q.global_scale))
            each = zip(q.codes.unbind(), scales, wholes, strict=True)
            return torch.stack([self.dequantize(QuantizedWeight(*one, self, q.shape), dtype) for one in each])
        scales = None if q.scales is None else q.scales.flatten(0, 1)
        whole = QuantizedWeight(q.codes.flatten(0, 1), scales, None, self, (count * rows, columns))
        return self.dequantize(whole, dtype).unflatten(0, (count, rows))

    def prepare(self, q: QuantizedWeight, dtype: torch.dtype) -> PreparedWeight:
        """Return the operand that `apply` multiplies inputs of `dtype` by; a weight-only format dequantizes."""
        return PreparedWeight(self.dequantize(q, dtype))

    def apply(self, x: Tensor, prepared: PreparedWeight, bias: Tensor | None = None) -> Tensor:
        """Return `x @ W.T + bias` in the format's own arithmetic: "... in" -> "... out", dtype of `x`."""
        return F.linear(x, prepared.operand, bias)

    def dequantized_input(self, x: Tensor) -> Tensor:
        """Return the inputs "... in" that `apply` multiplies, their codes multiplied out in the dtype of `x`.

        `x` itself where the format leaves activations alone; one that quantizes them says how.
        """
        if self.quantizes_activations:
            raise NotImplementedError(f"{type(self).__name__} quantizes activations, so it defines dequantized_input.")
        return x

    def kept_input(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return what of inputs "... in" is kept for `dequantized_kept`: themselves, or the codes that `apply` made."""
        return (x,)

    def dequantized_kept(self, kept: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Return the numbers of `dequantized_input`, in as many dimensions as `kept_input` kept.

        Args:
            kept: what `kept_input` returned.
            dtype: of the inputs.
        """
        return self.dequantized_input(kept[0])

    def linear(self, x: Tensor, q: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
        """Return what `apply` does, preparing the weight for this one call."""
        return self.apply(x, self.prepare(q, x.dtype), bias)

    def export(self, q: QuantizedWeight, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the checkpoint tensors of the layer `name` (without `.weight`), as vLLM's loader reads them."""
        for suffix, tensor in zip(self.suffixes, (q.codes, q.scales, q.global_scale), strict=False):
            assert tensor is not None
            yield f"{name}.{suffix}", tensor

    def checkpoint(self, q: QuantizedWeight, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors as a saved checkpoint names them, where that differs from a publish."""
        return self.export(q, name)

    def scale_shape(self, shape: tuple[int, int]) -> tuple[int, ...]:
        """Return the shape of the scales of a weight: one for each `inputs_together` of a row."""
        return shape[0], shape[1] // self.inputs_together

    def load(self, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantizedWeight:
        """Return the weight from its exported tensors, keyed by suffix (`weight`, `weight_scale`, …)."""
        codes, *others = (tensors[suffix] for suffix in self.suffixes)
        scales, whole = (*others, None, None)[:2]
        scales = None if scales is None else scales.reshape(self.scale_shape(shape))
        q = QuantizedWeight(codes, scales, None if whole is None else whole.reshape(1), self, shape)
        return expect_shape(q, (shape[0], shape[1] * int(self.bits_per_weight) // (8 * codes.element_size())))

    @abstractmethod
    def quantization_config(self, ignore: Sequence[str] = ("lm_head",)) -> dict[str, Any]:
        """Return the `quantization_config` of a Hugging Face `config.json`; empty for a dense format alone.

        Where no library reads the format it is that of compressed-tensors.
        """


def _stacked(made: Sequence[QuantizedWeight]) -> QuantizedWeight:
    first = made[0]
    codes, scales, wholes = (
        None if getattr(first, name) is None else torch.stack([getattr(one, name) for one in made])
        for name in ("codes", "scales", "global_scale")
    )
    assert codes is not None
    return QuantizedWeight(codes, scales, wholes, first.format, first.shape)


def expect_shape(q: QuantizedWeight, shape: tuple[int, int]) -> QuantizedWeight:
    """Return `q` when its codes belong to a weight of `shape`; raise `ValueError` otherwise."""
    if tuple(q.codes.shape) != tuple(shape):
        raise ValueError(
            f"The checkpoint tensor does not belong to this layer. Expected: shape {tuple(shape)}. "
            f"Given: {tuple(q.codes.shape)}. Load a checkpoint of the same model."
        )
    return q


def compressed_tensors_config(
    format: str,
    *,
    weights: Mapping[str, Any],
    activations: Mapping[str, Any] | None = None,
    ignore: Sequence[str] = ("lm_head",),
) -> dict[str, Any]:
    """Return a compressed-tensors `quantization_config` with one group that takes every linear layer.

    Args:
        format: the compressor's name, such as `float-quantized`.
        weights: bits, type, strategy, and where they apply group_size, block_structure, scale_dtype.
        activations: the same of dynamically quantized inputs, or None for weight-only.
        ignore: names of layers that stay as they are.
    """
    group = {
        "targets": ["Linear"],
        "weights": {"symmetric": True, "dynamic": False, **weights},
        "input_activations": None if activations is None else {"symmetric": True, "dynamic": True, **activations},
        "output_activations": None,
        "format": format,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
    }
