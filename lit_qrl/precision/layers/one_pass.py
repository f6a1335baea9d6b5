"""Norms and gated MLPs of a decoder in one kernel each, whose output may leave it quantized for the layers behind them.

The operator before a linear layer and the 1×128 quantization of its output are one pass over memory (Jet-RL,
arXiv:2601.14243, §4.1). Without the codes it is still one pass where the plain operations take up to six. The numbers
are those of the plain modules; where the kernels cannot run, the plain operations do.
"""

import logging
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lit_qrl.errors import ConfigError
from lit_qrl.formats.kernels import dispatch, gemm
from lit_qrl.functional._gradients import added, weight_gradients
from lit_qrl.network.invariant import one_by_one
from lit_qrl.network.structure import FINAL_NORM, GATED_MLP, NORM_READERS, RMS_NORMS, SILU
from lit_qrl.precision.layers.joined_linear import JoinedLinear
from lit_qrl.precision.layers.low_bit import LowBitLinear
from lit_qrl.precision.layers.rotary import rotate_in_one_pass

log = logging.getLogger(__name__)

Fuse = bool | Literal["auto"]
"""What the option `fuse` takes; `auto` is where the device has the kernels and the block is known."""

_HALF = (torch.bfloat16, torch.float16)
EXTENTS = {"": 0, dispatch.TILES: dispatch.BLOCK, dispatch.TOKENS: -1}
"""Columns that a scale covers; −1 is all."""


def _in_one_pass(kernel: str, codes: bool, x: Tensor, *others: Tensor) -> bool:
    available = dispatch.available_for_e4m3 if codes else dispatch.available
    if torch.compiler.is_compiling() or not available(x, kernel) or x.is_inference():
        return False
    same = all(other.dtype == x.dtype for other in others)
    return same and x.dtype in _HALF and x.shape[-1] % dispatch.BLOCK == 0


class _Norm(torch.autograd.Function):
    """The norm of x, or of x + residual, and what it is the norm of; both have one gradient, made in one pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, codes: bool, columns: bool,
        extent: int, made: list[Any],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        from lit_qrl.formats.kernels import norm_triton

        flat = (-1, x.shape[-1])
        beside = None if residual is None else residual.reshape(flat)
        given = x.reshape(flat), weight, eps, beside
        if codes and not extent:
            from lit_qrl.formats.kernels import tiles_triton

            h, _, rstd, _ = norm_triton.norm(*given, scale=False)
            y, *found = tiles_triton.tiles(h, True, columns, tiles_triton.NORM, rstd=rstd, weight=weight)
            made.extend(found)
        else:
            h, y, rstd, along = norm_triton.norm(*given, extent=extent)
            made.append(along if codes else rstd)
        # no views in autograd's eyes: they may be written to in place
        y, h = (torch.ops.aten._unsafe_view(one, list(x.shape)) for one in (y, h))
        h = x if residual is None else h
        ctx.save_for_backward(h, rstd, weight)
        ctx.added, ctx.weight = residual is not None, weight  # itself, whose gradient may be there
        ctx.set_materialize_grads(False)
        return y, h

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        h, rstd, weight = ctx.saved_tensors
        of_y, of_h = grads
        if of_y is None:
            return of_h, of_h if ctx.added else None, *[None] * 6
        from lit_qrl.formats.kernels import norm_triton

        flat = (-1, h.shape[-1])
        beside = None if of_h is None else of_h.reshape(flat)
        made, of_weight = norm_triton.norm_backward(of_y.reshape(flat), h.reshape(flat), rstd, weight, beside)
        made = made.view(h.shape)
        wanted = added([ctx.weight], of_weight)[0] if ctx.needs_input_grad[2] else None
        return made, made if ctx.added else None, wanted, *[None] * 5


class OnePassRMSNorm(nn.Module):
    """An RMS norm in one kernel that may keep the FP8 codes of its output for the layers that read it.

    Args:
        norm: the module whose place it takes and whose weight it owns.
        columns: whether those layers need the transpose too, for their weights' gradients.
        codes: what of, `TILES` or, without the transpose, `TOKENS` of `formats/kernels/dispatch.py`; "" for none.
    """

    def __init__(self, norm: Any, columns: bool, codes: str = dispatch.TILES) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon
        self.columns, self.codes = columns, codes
        self.train(norm.training)

    def forward(self, x: Tensor, residual: Tensor | None = None, both: bool = False) -> Any:
        """Return `weight · h / sqrt(mean h² + ε)` of h = residual + x, and with `both` h too: "... k" -> "... k"."""
        others = (self.weight,) if residual is None else (self.weight, residual)
        # the kernel sums in another order than the module of a sampler that is to give the same bits
        if one_by_one() or not _in_one_pass("norm", bool(self.codes), x, *others):
            h = x if residual is None else residual + x
            wide = h.float()
            y = self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)).to(
                h.dtype
            )
            return (y, h) if both else y
        made: list[Any] = []
        columns = self.columns and torch.is_grad_enabled()
        # with codes the kernel sums in another order: a learner's two passes, with gradients and without, take one way
        extent = 0 if self.columns else EXTENTS[self.codes]
        settings: Any = self.variance_epsilon, bool(self.codes), columns, extent, made
        y, h = _Norm.apply(x, residual, self.weight, *settings)  # pyright: ignore
        if self.codes:
            dispatch.keep(y, self.codes, *made)
        elif torch.is_grad_enabled():
            dispatch.keep(y, dispatch.RECIPE, (h.detach(), made[0], self.weight))
        return (y, h) if both else y


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, columns: bool, made: list[Any] | None, written: bool = True
    ) -> Tensor:
        from lit_qrl.formats.kernels import tiles_triton

        k, gated = gate.shape[-1], tiles_triton.GATED
        y, along, across = tiles_triton.tiles(
            gate.reshape(-1, k), made is not None, columns, gated, other=up.reshape(-1, k), written=written
        )
        if made is not None:
            made.extend((along, across))
        ctx.save_for_backward(gate, up)
        return y.view(gate.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from lit_qrl.formats.kernels import tiles_triton

        gate, up = ctx.saved_tensors
        k = gate.shape[-1]
        made = tiles_triton.gated_backward(grads[0].reshape(-1, k), gate.reshape(-1, k), up.reshape(-1, k))
        return *(one.view(gate.shape) for one in made), None, None, None


class _GatedDown(torch.autograd.Function):
    """`down(SiLU(gate) · up)` that keeps its factors alone; the backward pass makes the product again in passing."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, unread: bool) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        ctx.weight = weight  # itself, which has a gradient
        if unread:
            return gate.new_empty(*gate.shape[:-1], len(weight))
        from lit_qrl.formats.kernels import tiles_triton

        k = gate.shape[-1]
        y = tiles_triton.tiles(gate.reshape(-1, k), False, False, tiles_triton.GATED, other=up.reshape(-1, k))[0]
        return (y @ weight.t()).view(*gate.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from lit_qrl.formats.kernels import tiles_triton

        gate, up, weight = ctx.saved_tensors
        k, rows = gate.shape[-1], grads[0].reshape(-1, len(weight))
        trained = bool(ctx.needs_input_grad[2])
        hidden = rows @ weight  # its gradient, which becomes itself
        made = tiles_triton.gated_backward(hidden, *(one.reshape(-1, k) for one in (gate, up)), again=trained)  # pyright: ignore
        of_weight = weight_gradients([ctx.weight], rows, hidden)[0] if trained else None
        return *(one.view(gate.shape) for one in made), of_weight, None


class OnePassGatedMLP(nn.Module):
    """`down(SiLU(gate(x)) · up(x))`, product and SiLU in one kernel, that may keep the FP8 codes of what `down` reads.

    Args:
        mlp: the module whose place it takes and whose layers it owns, under their names.
        columns: whether `down` needs the transpose of its input too.
        codes: what of: `TILES` of `formats/kernels/dispatch.py`, or "" for none.
    """

    def __init__(self, mlp: Any, columns: bool, codes: str = dispatch.TILES) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.act_fn, self.columns, self.codes = mlp.act_fn, columns, codes
        self.training = mlp.training

    def forward(self, x: Tensor, unread: bool = False) -> Tensor:
        """Return the MLP's output: "... k" -> "... k"; with `unread` what is not wanted of it may be left out."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self._plain_down(gate, up):
            return _GatedDown.apply(gate, up, self.down_proj.weight, unread)  # pyright: ignore[reportReturnType]
        return self.down_proj(self.hidden(gate, up, read=not self._by_codes_alone(gate)))

    def _plain_down(self, gate: Tensor, up: Tensor) -> bool:
        """Return whether `down` is a product that nobody else looks at, and a backward pass is to come."""
        down = self.down_proj
        if self.codes or not torch.is_grad_enabled() or type(down) not in (nn.Linear, JoinedLinear):
            return False
        if down.bias is not None or isinstance(down.weight, DTensor) or one_by_one():
            return False
        if down._forward_hooks or down._forward_pre_hooks or down._backward_hooks or down._backward_pre_hooks:
            return False
        return not torch.is_autocast_enabled(gate.device.type) and _in_one_pass("gated", False, gate, up, down.weight)

    def _by_codes_alone(self, x: Tensor) -> bool:
        """Return whether `down` reads nothing of its input but the codes, and nobody else does."""
        down, device = self.down_proj, x.device.type
        if not (self.codes and self.columns and isinstance(down, LowBitLinear) and down.arithmetic.reads_codes_alone):
            return False
        if down._forward_hooks or down._forward_pre_hooks:
            return False
        return not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) == x.dtype

    def hidden(self, gate: Tensor, up: Tensor, read: bool = True) -> Tensor:
        """Return `SiLU(gate) · up`, which `down` reads; NaN beside its codes where these alone are read."""
        codes = self.codes == dispatch.TILES
        if not _in_one_pass("gated", codes, gate, up):
            return self.act_fn(gate) * up
        made: list[Any] | None = [] if codes else None
        hidden: Tensor = _Gated.apply(gate, up, self.columns and torch.is_grad_enabled(), made, read)  # pyright: ignore
        if made is not None:
            dispatch.keep(hidden, dispatch.TILES, *made)
        return hidden


def quantize_in_passing(network: nn.Module, columns: bool, choice: Fuse = True) -> None:
    """Replace norms and gated MLPs before quantized layers in place.

    A second call changes nothing. Parameters keep their names.

    Args:
        network: of decoder layers as in Llama, Mistral, Qwen2 and Qwen3.
        columns: whether the low-bit layers that read the codes need the transpose too.
        choice: True insists; `auto` does nothing on a host without the kernels, or to blocks that are not known.

    Raises:
        ConfigError: if nothing matched and `choice` is True.
    """
    if not choice or (choice == "auto" and not kernels_here()):
        return
    names = []
    for name, layer in list(network.named_modules()):
        for child, reader in {**NORM_READERS, "mlp": "mlp.down_proj"}.items():
            if isinstance(_at(layer, reader), LowBitLinear) and _takes_one_pass(layer, child, columns, dispatch.TILES):
                names.append(f"{name}.{child}")
    log.debug("%d norms and MLPs quantize what they hand on: %s.", len(names), ", ".join(names[:3]) or "none is known")
    if not names and choice is True:
        raise ConfigError(
            "No norm or MLP before a quantized layer was recognised.",
            expected="decoder layers as in Llama, Mistral, Qwen2 or Qwen3",
            given=type(network).__name__,
            remedy="Set fuse to false.",
        )


def take_one_pass(network: nn.Module, choice: Fuse = "auto") -> list[str]:
    """Replace norms and gated MLPs in place by ones that take one kernel, and return the names of those.

    Queries and keys are turned in one kernel too.

    For linear layers that compute in bf16 or fp16. A second call changes nothing; parameters keep their names.

    Args:
        network: of decoder layers as in Llama, Mistral, Qwen2 and Qwen3; whatever is not known stays as it is.
        choice: `auto` does nothing on a host without CUDA and Triton.
    """
    if not choice or (choice == "auto" and not (torch.cuda.is_available() and dispatch.triton_installed())):
        return []
    rotate_in_one_pass(network)
    names = []
    for name, part in list(network.named_modules()):
        for child, inner in list(part.named_children()):
            there = isinstance(inner, OnePassRMSNorm | OnePassGatedMLP)
            if child in (*NORM_READERS, FINAL_NORM, "mlp") and not there and _takes_one_pass(part, child, False, ""):
                names.append(f"{name}.{child}" if name else child)
    log.debug("%d norms and MLPs take one kernel: %s.", len(names), ", ".join(names[:3]) or "none is known")
    return names


def hand_on_codes(network: nn.Module) -> None:
    """Let the norms and MLPs of a sampler make the codes that layers laid together multiply, in place.

    Args:
        network: whose norms `take_one_pass` has replaced; whatever is not known stays as it is.
    """
    for layer in network.modules():
        for child, reader in {**NORM_READERS, "mlp": "mlp.down_proj"}.items():
            part = getattr(layer, child, None)
            if isinstance(part, OnePassRMSNorm | OnePassGatedMLP):
                part.codes = getattr(getattr(_at(layer, reader), "together", None), "codes_of", "")


def kernels_here() -> bool:
    """Return True when this process' CUDA device has the block-scaled FP8 GEMM and Triton is installed."""
    if not torch.cuda.is_available():
        return False
    device = torch.device("cuda", torch.cuda.current_device())
    return dispatch.triton_installed() and gemm.fp8_block_gemm(device, (dispatch.BLOCK, dispatch.BLOCK))


def _at(module: nn.Module, path: str) -> Any:
    for part in path.split("."):
        module = getattr(module, part, None)  # pyright: ignore
    return module


def _takes_one_pass(layer: nn.Module, child: str, columns: bool, codes: str) -> bool:
    """Let a norm or a gated MLP of a layer take one kernel, in place, and return whether it is a known one."""
    part: Any = getattr(layer, child, None)
    if isinstance(part, OnePassRMSNorm | OnePassGatedMLP):
        part.codes, part.columns = codes, columns
    elif type(part).__name__ in RMS_NORMS:
        setattr(layer, child, OnePassRMSNorm(part, columns, codes))
    elif isinstance(part, nn.Module) and {name for name, _ in part.named_children()} == GATED_MLP:
        if type(part.act_fn).__name__ not in SILU:
            return False
        setattr(layer, child, OnePassGatedMLP(part, columns, codes))
    else:
        return False
    return True
