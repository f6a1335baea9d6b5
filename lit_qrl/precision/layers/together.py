"""One product for the linear layers that read the same input: queries, keys and values; gate and up."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from lit_qrl.formats.base import QuantizedWeight
from lit_qrl.formats.kernels import dispatch
from lit_qrl.formats.scaled import Scaled
from lit_qrl.network.invariant import one_by_one
from lit_qrl.network.linears import fused_groups
from lit_qrl.network.structure import PLAIN_ATTENTION
from lit_qrl.precision.layers.low_bit import LowBitCodes, LowBitLinear

_ALIKE = (["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"])


class _Waiting(NamedTuple):
    """Outputs of layers that have not asked for theirs yet, by the layer's identity, and of what they are."""

    input: Tensor
    version: int
    recorded: bool
    outputs: dict[int, Tensor]


class Together:
    """Layers that read one input, multiplied at once where that is less work.

    The first of them that reads a tensor computes the outputs of all, which wait here for the others. The input's
    gradient is one sum instead of one for each layer, rounded once.

    A kind of layer derives from it and says how the product is computed.

    Args:
        layers: with one number of inputs.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self.layers: tuple[Any, ...] = tuple(layers)
        self.sizes = [layer.out_features for layer in layers]
        self._waiting: _Waiting | None = None

    def takes(self, x: Tensor) -> bool:
        """Return whether inputs are multiplied by all layers at once."""
        # bits that must not depend on the batch are those of each layer's own product
        return not (torch.compiler.is_compiling() or x.is_inference() or one_by_one())

    def compute(self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """Return the output of each layer, with gradients."""
        raise NotImplementedError

    def output(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """Return what one of the layers makes of `x`, "... in" -> "... out"."""
        held, state = self._waiting, (x._version, torch.is_grad_enabled())
        known = held is not None and held.input is x and (held.version, held.recorded) == state
        if held is None or not known or id(layer) not in held.outputs:
            made = self.compute(x, [one.weight for one in self.layers], [one.bias for one in self.layers])
            held = _Waiting(x, *state, dict(zip(map(id, self.layers), made, strict=True)))
        out = held.outputs.pop(id(layer))
        self._waiting = held if held.outputs else None
        return out

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_waiting": None}


class LowBitTogether(Together, LowBitCodes):
    """Low-bit layers whose codes are one weight, one layer's below another's.

    Each output has the arithmetic of its own layer: codes and scales are of rows, or of blocks of rows, that lie in one
    layer.

    Args:
        layers: that `fits` says.
    """

    def __init__(self, layers: Sequence[LowBitLinear]) -> None:
        super().__init__(layers)
        self.layer_name, self.arithmetic = layers[0].layer_name, layers[0].arithmetic
        self.out_features, self.in_features = sum(self.sizes), layers[0].in_features
        self._joined: tuple[tuple[Any, ...], QuantizedWeight] | None = None
        self._prepared = {}

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

    @override
    def takes(self, x: Tensor) -> bool:
        return super().takes(x) and self.holds(x.device)

    def holds(self, device: torch.device) -> bool:
        """Return whether the layers' codes are one weight: where the device multiplies codes.

        Weights that are gathered for one pass are multiplied one by one.
        """
        if self.arithmetic.gathered_in is not None or not self.arithmetic.joins or not isinstance(self.format, Scaled):
            return False
        return dispatch.triton_installed("together") and self.format.has_gemm(device, self.shape)

    @override
    def quantized(self) -> QuantizedWeight:
        """Return the codes of all layers as one weight; the layers' own are slices of it."""
        made = [layer.quantized() for layer in self.layers]
        if self._joined is None or any(a is not b for a, b in zip(self._joined[0], made, strict=True)):
            self._prepared.clear()
            with torch.inference_mode(False), torch.no_grad():
                codes = torch.cat([q.codes for q in made])
                scales = torch.cat([q.scales for q in made if q.scales is not None])
                places = zip(made, codes.split(self.sizes), scales.split([len(q.scales) for q in made]), strict=True)  # pyright: ignore
                for q, part, scale in places:
                    q.codes, q.scales = part, scale
            self._joined = tuple(made), QuantizedWeight(codes, scales, None, self.format, self.shape)
        return self._joined[1]

    @override
    def compute(self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Sequence[Tensor]:
        return self.arithmetic.multiply(x, self, self.sizes, *weights, *biases)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_joined": None, "_prepared": {}}


def reading_alike(network: Any, names: Iterable[str]) -> list[list[str]]:
    """Return the groups of linear layers of which it is known that they read the very same tensor.

    Args:
        network: a causal language model; of families that are not known there are none.
        names: of its linear layers.

    >>> from types import SimpleNamespace
    >>> llama = SimpleNamespace(config=SimpleNamespace(model_type="llama"))
    >>> reading_alike(llama, ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "other.q_proj"])
    [['mlp.gate_proj', 'mlp.up_proj']]
    """
    if getattr(getattr(network, "config", None), "model_type", None) not in PLAIN_ATTENTION:
        return []
    groups = fused_groups(names).values()
    return [group for group in groups if [name.rpartition(".")[2] for name in group] in _ALIKE]


def side_by_side(parts: Sequence[Tensor], dim: int = 1) -> Tensor:
    """Return matrices "m k" as one "m Σk", or with dim 0 one "Σm k", without a copy where they lie in memory so.

    >>> whole = torch.arange(6.0).view(2, 3)
    >>> side_by_side(whole.split([2, 1], dim=1)).data_ptr() == whole.data_ptr()
    True
    >>> side_by_side(whole.split(1), dim=0).data_ptr() == whole.data_ptr()
    True
    """
    first, length = parts[0], sum(part.shape[dim] for part in parts)
    if len(parts) == 1:
        return first
    stride, place = (length if dim else first.shape[1], 1), first.storage_offset()
    memory = first.untyped_storage().data_ptr()
    for part in parts:
        adjoins = part.storage_offset() == place and part.untyped_storage().data_ptr() == memory
        if part.stride() != stride or not adjoins:
            return torch.cat(list(parts), dim=dim)
        place += part.shape[1] if dim else part.numel()
    return first.as_strided((first.shape[0], length) if dim else (length, first.shape[1]), stride)


def end_to_end(biases: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor | None:
    """Return the biases of layers as one in `dtype`, None where they have none."""
    held = [bias for bias in biases if bias is not None]
    if not held:
        return None
    return (held[0] if len(held) == 1 else torch.cat(held)).to(dtype)
