"""A LoRA layer of PEFT whose two terms and their gradients are made together, with half of the kernels."""

from collections.abc import Callable
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as PEFTLinear
from torch import Tensor, nn
from torch.nn import functional as F

from lit_qrl.network.adapters import merged_tensors
from lit_qrl.network.autocast import autocast_input
from lit_qrl.network.names import base_of, is_adapter
from lit_qrl.precision.layers.low_bit import Steps
from lit_qrl.precision.layers.packed_linear import PackedLinear


class _Down(torch.autograd.Function):
    """`x Aᵀ`; keeps what both halves need for the backward pass.

    It comes before the product with the base, so that a recomputation under gradient checkpointing, which ends with
    the last tensor that is kept, leaves out the last base product of a checkpointed block.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor, low: tuple[Tensor, Tensor]) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        down = rows @ low[0].t()
        # a view, since an output itself would be kept in another way
        ctx.save_for_backward(rows, down.view_as(down), *low)
        ctx.shape, ctx.dtypes = x.shape, (a.dtype, b.dtype)
        return down

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        (rows, low_a, grad_x, grad_b), ctx.kept = ctx.kept, None
        wants_x, wants_a = ctx.needs_input_grad[:2]
        if wants_x:
            grad_x = grad_x.addmm_(grad, low_a).view(ctx.shape)
        grad_a = (grad.t() @ rows).to(ctx.dtypes[0]) if wants_a else None
        return grad_x, grad_a, None if grad_b is None else grad_b.to(ctx.dtypes[1]), None


class _Up(torch.autograd.Function):
    """`x Wᵀ + bias + scaling · down Bᵀ`, the second term added by its own product; or by the summed weight at once."""

    @staticmethod
    def forward(
        ctx: Any, down: Tensor, held: tuple[Any, Tensor, Tensor, nn.Linear | PackedLinear, float, Tensor | None]
    ) -> Tensor:
        ctx.first, x, low_b, ctx.base, ctx.scaling, merged = held
        if merged is None:
            out = _product(ctx.base, x).addmm_(down, low_b.t(), alpha=ctx.scaling)
        else:
            out = F.linear(x.reshape(-1, x.shape[-1]), merged, ctx.base.bias)
        # no view in autograd's eyes: a model may add to it in place, as Falcon's does
        return torch.ops.aten._unsafe_view(out, [*x.shape[:-1], out.shape[-1]])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        # may be asked for only once: a checkpointed block is computed again for it
        rows, down, low_a, low_b = ctx.first.saved_tensors
        wants_x, _, wants_b = ctx.first.needs_input_grad[:3]
        grad_x = grad @ _weight(ctx.base, grad) if wants_x else None
        grad_b = _scaled_product(grad.t(), down, ctx.scaling) if wants_b else None
        ctx.first.kept = (rows, low_a, grad_x, grad_b)
        return _scaled_product(grad, low_b, ctx.scaling), None


def _scaled_product(left: Tensor, right: Tensor, factor: float) -> Tensor:
    out = left.new_empty(left.shape[0], right.shape[1])
    return out.addmm_(left, right, beta=0, alpha=factor)


def _product(base: Any, x: Tensor) -> Tensor:
    """Return `x @ W.T + bias`: "... in" -> "n out", a new tensor in the dtype of `x`."""
    if isinstance(base, PackedLinear) and base.kernel == "format":
        # the input itself, which carries its codes from one layer that reads it to the next
        return base.product(x).view(-1, base.out_features)
    x = x.reshape(-1, x.shape[-1])
    if isinstance(base, PackedLinear):
        return base.product(x)
    return F.linear(x, base.weight.to(x.dtype), None if base.bias is None else base.bias.to(x.dtype))


def _weight(base: Any, like: Tensor) -> Tensor:
    if isinstance(base, PackedLinear):
        return base.dequantized(like.dtype, like.device)
    return base.weight.to(like.dtype)


class LoRALinear(PEFTLinear):
    """PEFT's LoRA layer over a frozen base, plain or packed: `x Wᵀ + b + s (x Aᵀ) Bᵀ`.

    Against PEFT's own forward pass: an input of 16 bits is not raised to the factors' fp32; both factors are lowered to
    its dtype, under autocast or not, once per optimizer step; the low-rank term, scaled and summed in fp32, is added to
    the base's by the product that makes it, and likewise in the gradient of the input. So the low-rank term is rounded
    once where PEFT rounds it three times (product, scale, sum), and the factors' gradients once to 16 bits; in fp32
    both differ by the order of additions.

    Anything but one plain adapter without dropout (other variants, several adapters, a trained bias, merged or
    disabled adapters) goes PEFT's own way. Names and parameters are PEFT's.
    """

    merged_forward: bool = False
    """True where the sampler, to the last bit, multiplies by the rounded sum of base and adapter."""
    _low: tuple[Any, tuple[Tensor, Tensor]] | None = None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the layer's output: "... in" -> "... out"."""
        base = base_of(self)
        name = None if args or kwargs else self.plain
        if name is None:
            return super().forward(x, *args, **kwargs)
        x_low = autocast_input(x)
        factors: Any = self.lora_A[name], self.lora_B[name]
        a, b = (part.weight for part in factors)
        if not (self._takes(a, x_low) and self._takes(b, x_low) and self._takes(base, x_low)):
            return super().forward(x)
        low = self._lowered(a, b, x_low.dtype)
        down: Tensor = _Down.apply(x_low, a, b, low)  # pyright: ignore[reportAssignmentType]
        merged = None
        if self.merged_forward:
            with torch._C.DisableTorchFunction():  # the sum is made as for the publish
                merged = merged_tensors(self)["weight"]
        held = (down.grad_fn, x_low, low[1], base, self.scaling[name], merged)
        return _Up.apply(down, held)  # pyright: ignore[reportReturnType]

    @property
    def plain(self) -> str | None:
        """The name of the adapter if it is the only one, trained or not, and nothing but two factors."""
        base: Any = base_of(self)
        names = self.active_adapters
        if len(names) != 1 or self.disable_adapters or self.merged or torch.compiler.is_compiling():
            return None
        (name,) = names
        if name not in self.lora_A or name in self.lora_variant or self.lora_bias.get(name):
            return None
        dropout = self.lora_dropout[name]
        if not isinstance(dropout, nn.Identity) and self.training:
            return None
        bias = base.bias
        if bias is not None and bias.requires_grad:
            return None
        if isinstance(base, PackedLinear):
            return name
        return name if type(base) is nn.Linear and not base.weight.requires_grad else None

    def _takes(self, part: Any, x: Tensor) -> bool:
        """Factors are lowered to the input's dtype, a base under autocast alone; nothing is raised to it."""
        if isinstance(part, PackedLinear):
            return True
        weight = part if isinstance(part, Tensor) else part.weight
        lowered = isinstance(part, Tensor) and x.element_size() < weight.element_size()
        return weight.dtype == x.dtype or lowered or torch.is_autocast_enabled(x.device.type)

    def _lowered(self, a: Tensor, b: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if a.dtype == dtype and b.dtype == dtype:
            return a.detach(), b.detach()
        key = (dtype, a._version, a.data_ptr(), b._version, b.data_ptr(), Steps.taken)
        if self._low is None or self._low[0] != key:
            with torch.inference_mode(False), torch.no_grad():
                self._low = (key, (a.detach().to(dtype), b.detach().to(dtype)))
        return self._low[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_low": None}


def keep_factors(network: nn.Module, convert: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return `convert` for all of a network's tensors that leaves adapters in fp32 where it would round them.

    Their updates are smaller than the spacing of 16-bit numbers. `LoRALinear` layers then lower them for the product.

    Args:
        network: a model with an adapter.
        convert: from a tensor to one of another dtype, or on another device.
    """
    named = [parameter for name, parameter in network.named_parameters() if is_adapter(name)]
    kept = {id(one) for p in named for one in (p, p.grad) if one is not None and one.dtype == torch.float32}

    def converted(tensor: Tensor) -> Tensor:
        moved = convert(tensor)
        lowered = id(tensor) in kept and moved.element_size() < tensor.element_size()
        return tensor.to(moved.device) if lowered else moved

    return converted


def swap_lora_linears(network: nn.Module) -> None:
    """Let PEFT's LoRA layers compute as `LoRALinear` does, in place.

    Args:
        network: a model with a LoRA adapter; without one nothing happens.
    """
    for module in network.modules():
        if type(module) is PEFTLinear:
            module.__class__ = LoRALinear


def sum_factors(network: nn.Module, merged: bool) -> None:
    """Let an adapter's layers multiply as an engine does that agrees to the last bit.

    Args:
        network: a model with or without an adapter.
        merged: the engine holds the rounded sum of base and adapter; else both beside each other.
    """
    for layer in network.modules():
        if isinstance(layer, LoRALinear):
            layer.merged_forward = merged
