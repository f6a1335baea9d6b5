"""A linear layer that holds its weight in a number format, as codes and scales."""

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from lit_qrl.formats.base import NumberFormat, PreparedWeight, QuantizedWeight
from lit_qrl.network.autocast import autocast_input


class QuantizedLinear(nn.Module):
    """A linear layer of a sampler: it holds codes and scales, and has no parameter but its bias.

    Args:
        format: the number format.
        shape: (out, in) of the weight.
        bias: the bias " out", or None.
        cache: keep what `format.prepare` makes of the codes between calls; it costs its memory and saves its time.
    """

    is_swapped = True
    codes: Tensor | None
    scales: Tensor | None
    global_scale: Tensor | None

    def __init__(
        self, format: NumberFormat, shape: tuple[int, int], bias: Tensor | None = None, cache: bool = True
    ) -> None:
        super().__init__()
        self.format, self.shape, self.cache = format, (int(shape[0]), int(shape[1])), cache
        self.out_features, self.in_features = self.shape
        for name in ("codes", "scales", "global_scale"):
            self.register_buffer(name, None, persistent=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self._prepared: dict[torch.dtype, PreparedWeight] = {}
        self.together: Any = None  # what multiplies it with the layers that read the same input, until new codes come

    @classmethod
    def from_linear(cls, linear: nn.Linear, format: NumberFormat, cache: bool = True) -> Self:
        """Return a layer of the same shape and bias whose weight is still to come by `load`."""
        return cls(format, (linear.out_features, linear.in_features), linear.bias, cache)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the weight from its checkpoint tensors, keyed by suffix (`weight`, `weight_scale`, …)."""
        device = next((one.device for one in (self.codes, self.bias) if one is not None), None)
        self.set_weight(self.format.load({k: v.to(device) for k, v in tensors.items()}, self.shape))

    def set_weight(self, q: QuantizedWeight) -> None:
        """Take a weight that is already quantized; its tensors are shared, not copied."""
        self.codes, self.scales, self.global_scale = q.codes, q.scales, q.global_scale
        self._prepared.clear()
        self.together = None

    @property
    def weight(self) -> QuantizedWeight:
        """The weight as it is held."""
        if self.codes is None:
            raise RuntimeError("This layer has no weight yet: publish to the engine before it generates.")
        return QuantizedWeight(self.codes, self.scales, self.global_scale, self.format, self.shape)

    def prepared(self, dtype: torch.dtype) -> PreparedWeight:
        """Return the operand for inputs of `dtype`, made once per weight."""
        operand = self._prepared.get(dtype)
        if operand is None:
            operand = self.format.prepare(self.weight, dtype)
            if self.cache:
                self._prepared[dtype] = operand
        return operand

    def dequantized(self, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """Return the weight "out in" multiplied out, made anew, on `device` if one is given."""
        return self.format.dequantize(self.weight, dtype).to(device)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x @ W.T + bias` in the format's arithmetic."""
        given, x = x, autocast_input(x)
        if self.together is not None and x is given and self.together.takes(x):
            return self.together.output(self, x)
        return self.format.apply(x, self.prepared(x.dtype), self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantizedLinear":
        # A module's `.to(dtype)` casts every floating buffer: codes and scales may move, but their dtype is the format.
        held = {name: getattr(self, name) for name in ("codes", "scales", "global_scale")}
        super()._apply(fn, recurse)
        for name, before in held.items():
            after = getattr(self, name)
            if before is not None and after.dtype != before.dtype:
                setattr(self, name, before.to(after.device))
        self._prepared.clear()
        self.together = None
        return self

    def extra_repr(self) -> str:
        """Return the format and the shape, for `print`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, format={self.format.name}"


def leave_to_each_rank(module: nn.Module) -> None:
    """Keep DDP from sending the weights of quantized layers around: before every forward pass, and FP8 not at all.

    Each rank makes them of the same weights.

    Args:
        module: what DDP will wrap.
    """
    root: Any = module
    ignored = set(getattr(root, "_ddp_params_and_buffers_to_ignore", ()))
    for name, part in module.named_modules():
        if isinstance(part, QuantizedLinear):
            ignored |= {f"{name}.{buffer}" for buffer in part._buffers}
    root._ddp_params_and_buffers_to_ignore = sorted(ignored)
