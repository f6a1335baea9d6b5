"""Jet-RL's unified precision flow: all three GEMMs of every linear layer in FP8, on both sides of the loop."""

import logging
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from lit_qrl.errors import ConfigError
from lit_qrl.formats.fp8_block import BLOCK, FP8Block
from lit_qrl.formats.support import tell_emulated
from lit_qrl.functional._gradients import added
from lit_qrl.network.linears import quantizable_layers
from lit_qrl.precision.base import QuantizedPrecision, device_of, network_of
from lit_qrl.precision.layers import block_fp8
from lit_qrl.precision.layers.block_fp8 import Backend, Operand
from lit_qrl.precision.layers.low_bit import Arithmetic, LowBitCodes
from lit_qrl.precision.layers.one_pass import Fuse, quantize_in_passing
from lit_qrl.precision.layers.together import end_to_end, side_by_side

log = logging.getLogger(__name__)

OPERAND = "operand"
"""Under which codes keep the weight as the products read it."""


class _BlockScaled(torch.autograd.Function):
    """Forward, input gradient and weight gradient in block-scaled FP8; the input is kept in FP8 in between."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: LowBitCodes, sizes: Sequence[int], learns: bool, *own: Any) -> Any:
        ctx.backend, count = held.arithmetic.backend, len(sizes)  # pyright: ignore[reportAttributeAccessIssue]
        backend: Backend = ctx.backend
        # The weight's gradient sums over tokens, so the input is kept quantized along them.
        along, across = backend.inputs(x, learns)
        across = across if learns else None
        weight = held.derived(OPERAND, backend.weight)
        out = backend.multiply(along, weight.forward, x.dtype, end_to_end(own[count:], x.dtype))
        held.used()
        ctx.held, ctx.multiplied = held, None if held.arithmetic.gathered_in is not None else weight
        ctx.shape, ctx.own = x.shape, own  # the parameters themselves, whose gradients may be there
        ctx.save_for_backward(*(() if across is None else (across.codes, across.scale)))
        # no view in autograd's eyes: a model may add to it in place, as Llama 4's does
        rows = x.numel() // x.shape[-1]
        out = out if len(out) == rows else out[:rows]
        out = torch.ops.aten._unsafe_view(out, [*x.shape[:-1], out.shape[-1]])
        return out if count == 1 else tuple(torch.unsafe_split_with_sizes(out, list(sizes), -1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flat, backend = side_by_side([grad.reshape(-1, grad.shape[-1]) for grad in grads]), ctx.backend
        count = len(ctx.own) // 2
        needs_weight, needs_bias = (any(ctx.needs_input_grad[4 + i : 4 + i + count]) for i in (0, count))
        along, across = backend.quantize(flat, ctx.needs_input_grad[0], needs_weight)
        grad_x, of_weights, of_biases = None, [None] * count, [None] * count
        if along is not None:
            weight = ctx.held.derived(OPERAND, backend.weight) if ctx.multiplied is None else ctx.multiplied
            grad_x = backend.multiply(along, weight.turned(), flat.dtype)[: flat.shape[0]].view(ctx.shape)
            ctx.held.used()
        if across is not None:
            codes, scale = ctx.saved_tensors
            grad_weight = backend.multiply(across, Operand(codes, scale, False), flat.dtype)
            of_weights = added(ctx.own[:count], grad_weight)
        if needs_bias:
            of_biases = added(ctx.own[count:], flat.sum(dim=0))
        return grad_x, None, None, None, *of_weights, *of_biases


class Unified(Arithmetic):
    """All three GEMMs are block-scaled FP8, of one backend."""

    backend: Any = None
    """Chosen when a model is checked."""

    def take(self, backend: Backend) -> None:
        """Multiply by that backend from now on."""
        self.backend = backend
        self.joins = self.reads_codes_alone = backend.name == "torch"

    @override
    def multiply(self, x: Tensor, held: LowBitCodes, sizes: Sequence[int], *own: Tensor | None) -> Any:
        learns = torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in own[: len(sizes)])
        return _BlockScaled.apply(x, held, sizes, learns, *own)


class UnifiedFP8(QuantizedPrecision):
    """One FP8 precision flow for learner and sampler (Jet-RL, arXiv:2601.14243, §4).

    Weights are quantized per 128×128, activations and gradients per 1×128, E4M3 throughout; activations are kept for
    the backward pass in FP8, gradients between operators and master weights stay bf16. The rollout format is
    `fp8_block`, and what is published are the codes and scales that the forward pass multiplies with.

    Args:
        backend: `te` (Transformer Engine's kernels), `torch` (scaled_mm), `emulate` (any device), or `auto`, which
            chooses for the Trainer's device, emulates where neither can run, and warns of it on a GPU.
        exclude: globs over names of linear layers that stay as they are, beside embeddings, output and routers.
        autocast: run the other operations in bf16 over fp32 master weights; `none` leaves each in its own dtype.
        fuse: quantize in the kernel of the norm or activation before a layer. `auto` does so with the backend torch,
            where the kernels run and the decoder's blocks are known. Unless it is false, `backend: auto` takes torch.

    Raises:
        ConfigError: for a backend that this host, or the Trainer's device, cannot run, or `fuse` with Transformer
            Engine's own quantizers.
    """

    def __init__(
        self,
        backend: Literal["auto", "te", "torch", "emulate"] = "auto",
        exclude: Sequence[str] = (),
        autocast: Literal["none", "bf16"] = "none",
        fuse: Fuse = "auto",
    ) -> None:
        super().__init__(FP8Block(), exclude, autocast)
        self.arithmetic = Unified(self.format)
        self._asked = backend
        self.fuse: Fuse = fuse
        if backend != "auto":  # which waits for the device
            self.arithmetic.take(block_fp8.backend(backend))
        if fuse is True and backend == "te":
            raise ConfigError(
                "The backend te quantizes with its own kernels, which are not fused with what comes before.",
                given="fuse: true",
                remedy="Set backend to torch, or fuse to false.",
            )

    @property
    def backend(self) -> Backend:
        """What multiplies; `auto` has chosen it once a model was checked."""
        return self.arithmetic.backend

    @override
    def check_model(self, network: nn.Module, device: torch.device) -> None:
        before = getattr(self.backend, "name", None)
        self.arithmetic.take(block_fp8.backend(self._asked, bool(self.fuse), device))
        if self._asked == "auto" and self.backend.name != before:
            log.info("UnifiedFP8 takes the backend %s.", self.backend.name)
        if self.backend.name != "emulate":
            self._check_shapes(quantizable_layers(network, self.exclude))
        super().check_model(network, device)

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        device = device_of(module)
        super().convert_module(module)  # which checks, and chooses the backend
        if self._asked == "auto" and self.backend.name == "emulate":
            tell_emulated("UnifiedFP8", self.format, device)
        if self.fuse is True or self.backend.name == "torch":
            quantize_in_passing(network_of(module), columns=True, choice=self.fuse)
        return module

    def _check_shapes(self, layers: dict[str, tuple[int, int]]) -> None:
        odd = [f"{name} {shape}" for name, shape in layers.items() if shape[0] % BLOCK or shape[1] % BLOCK]
        if odd:
            raise ConfigError(
                f"{len(odd)} layers do not fit the FP8 GEMM: {', '.join(odd[:4])}{' …' if len(odd) > 4 else ''}.",
                expected=f"in_features and out_features divisible by {BLOCK}",
                remedy="Exclude them with the plugin's `exclude` globs, or set backend to emulate.",
            )
