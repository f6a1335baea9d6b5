"""One product for the low-bit layers that read the same input: queries, keys and values; gate and up."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_qrl.formats.base import QuantizedWeight
from lit_qrl.formats.kernels import dispatch
from lit_qrl.formats.scaled import Scaled
from lit_qrl.precision.layers.low_bit import LowBitLinear

_OUTPUTS = "_lit_qrl_outputs"


class _Outputs(NamedTuple):
    group: "Together"
    version: int
    recorded: bool
    of: dict[int, Tensor]


class Together:
    """Layers that read one input, multiplied as one whose codes are theirs, one below another.

    Each output has the arithmetic of its own layer: codes and scales are of rows, or of blocks of rows, that lie in one
    layer. The input's gradient is one sum instead of one for each layer, rounded once. The first layer that reads a
    tensor computes the outputs of all, which wait with the tensor for the others.

    A kind of layer derives from it and says how the product is computed.

    Args:
        layers: that `fits` says.
    """

    gathered_in: torch.dtype | None = None

    def __init__(self, layers: Sequence[LowBitLinear]) -> None:
        self.layers = tuple(layers)
        self.sizes = [layer.out_features for layer in layers]
        self.layer_name = layers[0].layer_name
        self.shape = sum(self.sizes), layers[0].in_features
        self._joined: tuple[tuple[Any, ...], QuantizedWeight] | None = None
        self.prepared: dict[Any, Any] = {}
        """What a product was made of the codes as they are."""

    @staticmethod
    def fits(layers: Sequence[LowBitLinear]) -> bool:
        """Return whether no scale of theirs is another layer's too, and they are alike otherwise."""
        first = layers[0]
        rows = first.format.rows_together
        return (
            len(layers) > 1
            and isinstance(first.format, Scaled)
            and rows is not None
            and all(layer.out_features % rows == 0 for layer in layers)
            and len({(layer.in_features, layer.bias is None) for layer in layers}) == 1
        )

    def takes(self, x: Tensor) -> bool:
        """Return whether inputs are multiplied by all layers at once: where the device multiplies their codes.

        Weights that are gathered for one pass are multiplied one by one.
        """
        if self.layers[0].gathered_in is not None or torch.compiler.is_compiling() or x.is_inference():
            return False
        format = self.layers[0].format
        return dispatch.available(x) and isinstance(format, Scaled) and format.has_gemm(x.device, self.shape)

    def compute(self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """Return the output of each layer, with gradients."""
        raise NotImplementedError

    def output(self, layer: LowBitLinear, x: Tensor) -> Tensor:
        """Return what one of the layers makes of `x`, "... in" -> "... out"."""
        held: _Outputs | None = getattr(x, _OUTPUTS, None)
        recorded = torch.is_grad_enabled()
        known = held is not None and (held.group, held.version, held.recorded) == (self, x._version, recorded)
        if not known or id(layer) not in held.of:  # pyright: ignore[reportOptionalMemberAccess]
            made = self.compute(x, [one.weight for one in self.layers], [one.bias for one in self.layers])
            held = _Outputs(self, x._version, recorded, dict(zip(map(id, self.layers), made, strict=True)))
            setattr(x, _OUTPUTS, held)
        assert held is not None
        out = held.of.pop(id(layer))
        if not held.of:
            delattr(x, _OUTPUTS)
        return out

    def quantized(self) -> QuantizedWeight:
        """Return the codes of all layers as one weight; the layers' own are slices of it."""
        made = [layer.quantized() for layer in self.layers]
        if self._joined is None or any(a is not b for a, b in zip(self._joined[0], made, strict=True)):
            self.prepared.clear()
            with torch.inference_mode(False), torch.no_grad():
                codes = torch.cat([q.codes for q in made])
                scales = torch.cat([q.scales for q in made if q.scales is not None])
                places = zip(made, codes.split(self.sizes), scales.split([len(q.scales) for q in made]), strict=True)  # pyright: ignore
                for q, part, scale in places:
                    q.codes, q.scales = part, scale
            self._joined = tuple(made), QuantizedWeight(codes, scales, None, self.layers[0].format, self.shape)
        return self._joined[1]

    def used(self) -> None:
        """Keep everything, as weights are that are not gathered for one pass."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_joined": None, "prepared": {}}


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Return matrices "m k" as one "m Σk", without a copy where they lie in memory so.

    >>> whole = torch.arange(6.0).view(2, 3)
    >>> side_by_side(whole.split([2, 1], dim=1)).data_ptr() == whole.data_ptr()
    True
    """
    first, width = parts[0], sum(part.shape[1] for part in parts)
    if len(parts) == 1:
        return first
    stride, place = (width, 1), first.storage_offset()
    memory = first.untyped_storage().data_ptr()
    for part in parts:
        adjoins = part.storage_offset() == place and part.untyped_storage().data_ptr() == memory
        if part.stride() != stride or not adjoins:
            return torch.cat(list(parts), dim=1)
        place += part.shape[1]
    return first.as_strided((first.shape[0], width), stride)


def end_to_end(biases: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor | None:
    """Return the biases of layers as one in `dtype`, None where they have none."""
    held = [bias for bias in biases if bias is not None]
    if not held:
        return None
    return (held[0] if len(held) == 1 else torch.cat(held)).to(dtype)
