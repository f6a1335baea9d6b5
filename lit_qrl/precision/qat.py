"""QaRL's aligned learner: the forward pass in the sampler's low-bit arithmetic, gradients straight through to it."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from typing_extensions import override

from lit_qrl import formats
from lit_qrl.errors import ConfigError
from lit_qrl.formats import FP8Block
from lit_qrl.formats.base import NumberFormat
from lit_qrl.formats.support import require_fp8, tell_emulated
from lit_qrl.functional._gradients import added, weight_gradients
from lit_qrl.precision.base import QuantizedPrecision, device_of, network_of
from lit_qrl.precision.layers.low_bit import Arithmetic, LowBitCodes
from lit_qrl.precision.layers.one_pass import Fuse, quantize_in_passing
from lit_qrl.precision.layers.together import end_to_end, side_by_side
from lit_qrl.precision.vllm_kernels.kernels import Kernel, KernelChoice

Backward = Literal["dequantized", "high_precision"]
"""Which operands the backward pass multiplies the output's gradient by; the words are Transformer Engine's."""


class _StraightThrough(torch.autograd.Function):
    """The format's GEMM forward; backward the gradients of `x @ W.T + b`, of its own operands or of those before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: LowBitCodes, sizes: Sequence[int], *own: Any) -> Any:
        count, how = len(sizes), held.arithmetic
        assert isinstance(how, Aligned)
        # the parameters themselves, whose gradients may be there
        ctx.held, ctx.own, ctx.shape, ctx.dtype = held, own, x.shape, x.dtype
        out = how.product(x, held, end_to_end(own[count:], x.dtype))
        ctx.save_for_backward(*how.kept_input(x, held), own[0])
        held.used()
        # no view in autograd's eyes: a model may add to it in place, as Falcon's does
        out = torch.ops.aten._unsafe_view(out, list(out.shape))
        return out if count == 1 else tuple(torch.unsafe_split_with_sizes(out, list(sizes), -1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *kept, weight = ctx.saved_tensors
        how: Aligned = ctx.held.arithmetic
        flat = side_by_side([grad.reshape(-1, grad.shape[-1]) for grad in grads])
        count = len(ctx.own) // 2
        needs_weight, needs_bias = (any(ctx.needs_input_grad[3 + i : 3 + i + count]) for i in (0, count))
        grad_x, of_weights, of_biases = None, [None] * count, [None] * count
        if ctx.needs_input_grad[0]:
            grad_x = (flat @ how.backward_weight(ctx.held, weight, flat.dtype)).view(ctx.shape)
        if needs_weight:
            inputs = how.backward_input(kept, ctx.dtype).reshape(-1, ctx.shape[-1])
            of_weights = weight_gradients(ctx.own[:count], flat, inputs)
        if needs_bias:
            of_biases = added(ctx.own[count:], flat.sum(dim=0))
        ctx.held.used()
        return grad_x, None, None, *of_weights, *of_biases


class Aligned(Arithmetic):
    """Codes are multiplied as the sampler does; the backward pass has operands of its choice.

    Args:
        format: of the weights.
        kernel: the plugin's option.
        backward: the operands of the backward pass.
    """

    def __init__(self, format: NumberFormat, kernel: Kernel = "auto", backward: Backward = "dequantized") -> None:
        super().__init__(format)
        self.choice, self.backward_operands = KernelChoice(kernel, format), backward
        self.groups = not format.quantizes_activations  # which has a GEMM of its own
        self.joins = backward == "dequantized"

    @override
    def multiply(self, x: Tensor, held: LowBitCodes, sizes: Sequence[int], *own: Tensor | None) -> Any:
        return _StraightThrough.apply(x, held, sizes, *own)

    def product(self, x: Tensor, held: LowBitCodes, bias: Tensor | None) -> Tensor:
        """Return `x @ Q(W).T + b`."""
        kernel = self.choice.pick(held.layer_name, held.shape, x)
        if kernel is None:
            return self.format.apply(x, held.prepared(x.dtype), bias)
        made = held.derived((kernel.vllm_name, x.dtype), lambda q: kernel.prepare(q, x.dtype))
        return kernel.apply(x, made, bias)

    @override
    def backward_weight(self, held: LowBitCodes, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what the output's gradient is multiplied by for that of the input: Q(W) multiplied out, or W."""
        if self.backward_operands == "high_precision":
            return weight.to(dtype)
        q = held.quantized()
        prepared = held._prepared.get(dtype)
        if prepared is not None and not prepared.native:
            return prepared.operand.to(dtype)
        return self.format.dequantize(q, dtype)  # for this product alone: the forward pass keeps the codes

    def kept_input(self, x: Tensor, held: LowBitCodes) -> tuple[Tensor, ...]:
        """Return what `backward_input` will need of an input: the codes that were multiplied, or the input itself."""
        if self.backward_operands == "high_precision":
            return (x,)
        kernel = self.choice.pick(held.layer_name, held.shape, x)
        made = None if kernel is None else kernel.kept_input(x)
        return self.format.kept_input(x) if made is None else made

    def backward_input(self, kept: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return what the output's gradient is multiplied by for that of the weight: Q(x) multiplied out, or x."""
        high = self.backward_operands == "high_precision"
        return kept[0] if high else self.format.dequantized_kept(tuple(kept), dtype)


class QATAligned(QuantizedPrecision):
    """Quantization-aware RL: the learner's forward pass runs in the rollout's number format (QaRL, §3.1).

    Each linear layer quantizes its master weight once per optimizer step, multiplies in the format's own arithmetic,
    and passes gradients straight through to the master weight. What is published are those very codes and scales.

    The paper gives the backward pass no equation. With y = Q(x) Q(W)ᵀ (eqs. 1, 2) and g the gradient of y, both
    readings multiply in the dtype of g and take dQ(u)/du = 1:

    - `dequantized`: the straight-through estimator of fake quantization (§2.2), by which the rounding alone is passed
      over: dx = g Q(W), dW = gᵀ Q(x). It is the gradient of what the forward pass computes.
    - `high_precision`: "keeping the backward pass in full precision" (§3.1) said of the operands too:
      dx = g W, dW = gᵀ x, the gradient of the unquantized layer at the activations of the quantized network.

    Args:
        weights: a number format, or its name.
        activations: for a format that leaves the choice: how inputs are quantized (`fp8`, `int8`, `token`, …).
        exclude: globs over names of linear layers that stay as they are, beside embeddings, output and routers.
        autocast: run the other operations in bf16 over fp32 master weights; `none` leaves each in its own dtype.
        kernel: how `fp8_row`, and `int4_group` under FP8 activations, are multiplied: `auto` by vLLM's own kernel when
            vLLM is the sampler and has one for the layer, else `dequantize`, as the format says.
        backward: the operands of the backward pass, as above. `high_precision` keeps the layer's input in its own dtype
            for it. `dequantized` keeps the input's FP8 codes where the device multiplies those, else the input, which
            it rounds anew; it multiplies out one weight at a time, unless the forward pass keeps it so.
        fuse: quantize in the kernel of the norm or activation before a layer; for fp8_block. `auto` does so where the
            kernels run and the decoder's blocks are known.

    Raises:
        ConfigError: for an unknown format, activations that the format does not know, or an unknown kernel.
    """

    def __init__(
        self,
        weights: NumberFormat | str = "int4_group",
        activations: str | None = None,
        exclude: Sequence[str] = (),
        autocast: Literal["none", "bf16"] = "none",
        kernel: Kernel = "auto",
        fuse: Fuse = "auto",
        backward: Backward = "dequantized",
    ) -> None:
        format = formats.get(weights)
        if backward not in get_args(Backward):
            raise ConfigError(
                "There is no such backward pass.", expected="dequantized or high_precision", given=repr(backward)
            )
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
        self.arithmetic = Aligned(format, kernel, backward)
        self.choice = self.arithmetic.choice
        self.fuse: Fuse = fuse
        if fuse is True and not isinstance(format, FP8Block):
            raise ConfigError(
                f"The inputs of {format.name} are not quantized per 1×128, so there is nothing to fuse.",
                expected="weights: fp8_block",
                given="fuse: true",
                remedy="Set fuse to false.",
            )

    @override
    def check_model(self, network: nn.Module, device: torch.device) -> None:
        super().check_model(network, device)
        remedy = "Choose int8_channel or int4_group, or UnifiedFP8 with backend: emulate."
        require_fp8("QATAligned", self.format, device, remedy)

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        super().convert_module(module)
        self.choice.follow(module)
        tell_emulated("QATAligned", self.format, device_of(module))
        if isinstance(self.format, FP8Block):
            quantize_in_passing(network_of(module), columns=False, choice=self.fuse)
        return module
