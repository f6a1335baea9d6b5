"""Linear layers that read the same input, multiplied as one: one product fills a GPU better than several small ones.

Their weights are laid behind one another in memory when they are published, each still the tensor of its own layer.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_qrl.formats.scaled import ScaledE4M3
from lit_qrl.network.quantized_linear import QuantizedLinear

PARTS = {"self_attn": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj")}
"""Layers of a Llama's block that read the same input."""


def members(block: nn.Module, part: str) -> list[Any]:
    """Return the layers of a part of a block that read the same input."""
    return [getattr(getattr(block, part), name) for name in PARTS[part]]


class Group:
    """Layers as one.

    Args:
        sizes: of each one's outputs.
        whole: their weights, or codes, "out in".
        scale: of the codes, one for all or "out 1".
        format: of the codes; None for plain weights.
    """

    def __init__(self, sizes: list[int], whole: Tensor, scale: Tensor | None, format: ScaledE4M3 | None) -> None:
        self.sizes, self.whole, self.scale, self.format = sizes, whole, scale, format

    @classmethod
    def of(cls, layers: Sequence[nn.Module]) -> "Group | None":
        """Return layers as one where their weights lie one behind the other and nothing is added to their outputs."""
        tensors = _weights(layers)
        if tensors is None or any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers):
            return None
        at = tensors[0].data_ptr()
        for tensor in tensors:
            if tensor.data_ptr() != at or not tensor.is_contiguous():
                return None
            at += tensor.numel() * tensor.element_size()
        if len({tensor.untyped_storage().data_ptr() for tensor in tensors}) > 1:
            return None
        sizes, columns = [len(tensor) for tensor in tensors], tensors[0].shape[1]
        whole = tensors[0].as_strided((sum(sizes), columns), (columns, 1))
        if not isinstance(layers[0], QuantizedLinear):
            return cls(sizes, whole, None, None)
        format, prepared = layers[0].format, [layer.prepared(torch.bfloat16) for layer in layers]  # pyright: ignore
        scales = [one.scale for one in prepared if one.native and one.scale is not None]
        if not isinstance(format, ScaledE4M3) or len(scales) < len(layers):
            return None
        if all(scale.numel() == 1 for scale in scales):
            same = bool((torch.stack([scale.reshape(()) for scale in scales]) == scales[0].reshape(())).all())
            return cls(sizes, whole, scales[0], format) if same else None
        return cls(sizes, whole, torch.cat([scale.reshape(-1, 1) for scale in scales]), format)

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return each one's output "... out", as parts of one tensor."""
        if self.format is None:
            found = F.linear(x, self.whole)
        else:
            assert self.scale is not None
            found = self.format.multiply(x, self.whole, self.scale, None).view(*x.shape[:-1], -1)
        return found.split(self.sizes, dim=-1)


def _weights(layers: Sequence[nn.Module]) -> list[Tensor] | None:
    """Return weights, or codes, of layers of one kind without a bias, or None."""
    if any(getattr(layer, "bias", None) is not None for layer in layers):
        return None
    if all(type(layer) is nn.Linear for layer in layers):
        tensors: list[Any] = [layer.weight.detach() for layer in layers]  # pyright: ignore
    elif all(isinstance(layer, QuantizedLinear) and layer.format == layers[0].format for layer in layers):
        tensors = [layer.codes for layer in layers]
        if not all(isinstance(layer.format, ScaledE4M3) for layer in layers):
            return None
    else:
        return None
    alike = {(tensor.dtype, tensor.device, tensor.shape[1]) for tensor in tensors}
    return tensors if len(alike) == 1 else None


def lay_together(blocks: Sequence[nn.Module], owned: Collection[int]) -> int:
    """Lay the weights of layers that read the same input behind one another, and return in how many groups.

    Args:
        blocks: a Llama's.
        owned: storages of the learner's own weights, by address, which stay where they are.
    """
    count = 0
    for block in blocks:
        for part in PARTS:
            layers = members(block, part)
            tensors = _weights(layers)
            if tensors is None or any(tensor.untyped_storage().data_ptr() in owned for tensor in tensors):
                continue
            pieces = torch.cat([tensor.contiguous().view(torch.uint8) for tensor in tensors]).split(
                [len(one) for one in tensors]
            )
            for layer, tensor, piece in zip(layers, tensors, pieces, strict=True):
                laid = piece.view(tensor.dtype)
                if isinstance(layer, QuantizedLinear):
                    layer.set_weight(replace(layer.weight, codes=laid))
                else:
                    layer.weight = nn.Parameter(laid, requires_grad=False)
            count += 1
    return count
