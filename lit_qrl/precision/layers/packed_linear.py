"""A frozen linear layer in few bits: codes of its own, or the engine's."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_qrl.formats.base import QuantizedWeight
from lit_qrl.network.autocast import autocast_input
from lit_qrl.network.quantized_linear import QuantizedLinear
from lit_qrl.network.shards import Divided, divided
from lit_qrl.precision.vllm_kernels.borrowed import MarlinNVFP4
from lit_qrl.precision.vllm_kernels.kernels import KernelChoice

Product = Literal["format", "dequantize"]
"""How the forward pass multiplies: as the format does, inputs quantized; by the weight multiplied out."""


class _Packed(torch.autograd.Function):
    """`x @ W.T + b` over a packed weight; where it is multiplied out, in each direction anew, it is never kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: "PackedLinear") -> Tensor:
        ctx.layer = layer
        out = layer.product(x)
        # no view in autograd's eyes: a model may add to it in place, as Falcon's does
        return torch.ops.aten._unsafe_view(out, list(out.shape))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        return grad @ ctx.layer.dequantized(grad.dtype, grad.device), None, None


class PackedLinear(QuantizedLinear):
    """A frozen linear layer that holds codes and scales alone; gradients pass through it to what lies below."""

    waits_on_host: bool = False
    """True while the codes stay on the host, whatever the module is moved to, until an engine holds them."""
    stored: MarlinNVFP4 | None = None
    """The weight in an engine's memory, in place of codes of its own."""
    parts: dict[str, Divided] | None = None
    """How codes and scales are gathered of which this process holds a part, for one product at a time."""
    kernel: Product = "dequantize"
    choice: KernelChoice | None = None
    """The sampler's own kernel of the format, where it has one for the layer and samples with it."""
    layer_name: str = ""

    def dequantized(self, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """Return the weight "out in", made anew; codes that lie elsewhere are brought to `device` for the call."""
        if self.stored is not None:
            assert self.global_scale is not None
            return self.stored.dequantized(self.format, self.global_scale, dtype)
        return self.format.dequantize(self.weight if device is None else self.weight_on(device), dtype)

    def product(self, x: Tensor) -> Tensor:
        """Return `x @ W.T + b` as a new tensor: "... in" -> "... out", in the dtype of `x`; no gradient is recorded."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if self.kernel != "format":
            return F.linear(x, self.dequantized(x.dtype, x.device), bias)
        # made of the codes for this one product: nothing that the format's GEMM takes is kept beside them
        q, own = self.weight_on(x.device), None
        if self.choice is not None:
            own = self.choice.pick(self.layer_name, self.shape, x)
        if own is not None:
            return own.apply(x, own.prepare(q, x.dtype), bias)
        return self.format.apply(x, self.format.prepare(q, x.dtype), bias)

    @property
    def weight(self) -> QuantizedWeight:
        """The weight in the layout of a checkpoint; of one that is borrowed, a copy."""
        if self.parts is not None:
            whole = {name: one.whole(getattr(self, name)) for name, one in self.parts.items()}
            codes, scales = whole["codes"], whole.get("scales")
            return QuantizedWeight(codes, scales, self.global_scale, self.format, self.shape)
        if self.stored is None:
            return super().weight
        assert self.global_scale is not None
        return self.stored.quantized(self.format, self.global_scale)

    def weight_on(self, device: torch.device) -> QuantizedWeight:
        """Return the weight with its tensors on `device`."""
        return moved(self.weight, device)

    def wait_on_host(self) -> None:
        """Move the codes to the host until an engine holds them."""
        self.set_weight(self.weight_on(torch.device("cpu")))
        self.waits_on_host = True

    def divide(self, group: Any) -> None:
        """Keep this process's part of codes and scales; from now on all processes must use the layer alike."""
        made = {name: divided(held, group) for name in ("codes", "scales") if (held := getattr(self, name)) is not None}
        self.codes, self.scales = made["codes"][0], made["scales"][0] if "scales" in made else None
        self.parts = {name: whole for name, (_, whole) in made.items()}

    def borrow(self, stored: MarlinNVFP4) -> None:
        """Read the weight from `stored` from now on, and drop the codes and scales held here."""
        assert self.global_scale is not None
        self.stored, self.waits_on_host = stored, False
        self.codes = self.scales = None
        self.global_scale = self.global_scale.to(stored.words.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PackedLinear":
        if not self.waits_on_host:
            super()._apply(fn, recurse)
            return self
        held = self.codes, self.scales, self.global_scale
        self.codes = self.scales = self.global_scale = None
        super()._apply(fn, recurse)
        self.codes, self.scales, self.global_scale = held
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return `x @ W.T + b`: "... in" -> "... out", in the dtype of `x`."""
        return _Packed.apply(autocast_input(x), self.bias, self)  # pyright: ignore[reportReturnType]


def moved(q: QuantizedWeight, device: torch.device) -> QuantizedWeight:
    """Return a weight with its tensors on `device`."""
    scales, global_scale = (None if part is None else part.to(device) for part in (q.scales, q.global_scale))
    return QuantizedWeight(q.codes.to(device), scales, global_scale, q.format, q.shape)
