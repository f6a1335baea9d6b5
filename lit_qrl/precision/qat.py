"""QaRL's aligned learner: the forward pass in the sampler's low-bit arithmetic, the backward pass as if it were not."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from lit_qrl.errors import ConfigError
from lit_qrl.precision import formats
from lit_qrl.precision.base import LowBitLinear, QuantizedPrecision, autocast_input
from lit_qrl.precision.formats.base import NumberFormat


class _StraightThrough(torch.autograd.Function):
    """The format's GEMM forward; the gradients of `x @ W.T + b` with the master weight backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: "AlignedLinear") -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return layer.format.apply(x, layer.prepared(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        flat = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = (flat @ weight.to(flat.dtype)).view(x.shape)
        if ctx.needs_input_grad[1]:
            grad_weight = flat.t() @ x.reshape(-1, x.shape[-1])
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_bias = flat.sum(dim=0)
        return grad_x, grad_weight, grad_bias, None


class AlignedLinear(LowBitLinear):
    """A linear layer that multiplies as the sampler does and learns as a plain one."""

    def forward(self, input: Tensor) -> Tensor:
        """Return `x @ Q(W).T + b` in the format's arithmetic: "... in" -> "... out"."""
        return _StraightThrough.apply(autocast_input(input), self.weight, self.bias, self)  # pyright: ignore


class QATAligned(QuantizedPrecision):
    """Quantization-aware RL: the learner's forward pass runs in the rollout's number format (QaRL, §3.1).

    Each linear layer quantizes its master weight once per optimizer step, multiplies in the format's own arithmetic,
    and passes gradients straight through to the master weight. What is published are those very codes and scales.

    Args:
        weights: a number format, or its name.
        activations: for a format that leaves the choice: how inputs are quantized (`fp8`, `int8`, `token`, …).
        exclude: globs over names of linear layers that stay as they are, beside embeddings, output and routers.
        autocast: run the other operations in bf16 over fp32 master weights; `none` leaves each in its own dtype.

    Raises:
        ConfigError: for an unknown format, or activations that the format does not know.
    """

    layer_class = AlignedLinear

    def __init__(
        self,
        weights: NumberFormat | str = "int4_group",
        activations: str | None = None,
        exclude: Sequence[str] = (),
        autocast: Literal["none", "bf16"] = "none",
    ) -> None:
        format = formats.get(weights)
        if activations is not None:
            if not is_dataclass(format) or "activations" not in {field.name for field in fields(format)}:
                raise ConfigError(
                    f"The format {format.name} fixes how activations are quantized.",
                    given=f"activations: {activations}",
                    remedy="Leave activations out, or choose int4_group or fp8_tensor.",
                )
            try:
                format: NumberFormat = replace(format, activations=activations)  # pyright: ignore
            except ValueError as error:
                raise ConfigError(str(error)) from None
        super().__init__(format, exclude, autocast)
