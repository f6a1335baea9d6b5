"""The three GEMMs of a linear layer in block-scaled FP8, on three backends with the same numbers.

Each operand holds E4M3 codes whose last dimension is the one that the GEMM sums over, and a scale per 1×128 or
128×128 of them (Jet-RL, arXiv:2601.14243, §4.2; the scheme of DeepSeek-V3).
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_qrl.errors import ConfigError
from lit_qrl.formats.base import QuantizedWeight
from lit_qrl.formats.fp8_block import BLOCK
from lit_qrl.formats.kernels import activations, dispatch, gemm

TE_REQUIREMENT = "transformer_engine>=2.10"


class Operand(NamedTuple):
    """One side of a GEMM.

    Args:
        codes: float8_e4m3fn, "rows inner"; inner is padded with zeros to a multiple of 128 where it is tokens.
        scale: fp32 as the backend reads it, logically "rows inner/128" or, for a weight, "rows/128 inner/128"; None
            where the codes are multiplied out already.
        blocks: True when the scales are per 128×128.
    """

    codes: Tensor
    scale: Tensor | None
    blocks: bool


class Weight(NamedTuple):
    """A weight of which one set of codes is held for both products.

    Args:
        forward: "n k", of the forward product.
        scale: of the transpose "k n", which the input's gradient is made with; None where codes are multiplied out.
    """

    forward: Operand
    scale: Tensor | None

    def turned(self) -> Operand:
        """Return the transpose.

        Each backward pass makes it anew: an FP8 GEMM reads both operands along the dimension that it sums over, and a
        second set of codes is a byte a parameter, 6 GiB of a 7B model's learner, where turning the first is one pass
        over them, a hundredth of the backward pass's products.
        """
        codes = self.forward.codes
        if self.forward.scale is None:
            return Operand(codes.t(), None, True)
        return Operand(dispatch.transposed(codes), self.scale, True)


class Backend(ABC):
    """Quantizes activations and gradients, and multiplies."""

    name: str

    @abstractmethod
    def quantize(self, x: Tensor, rows: bool, columns: bool) -> tuple[Operand | None, Operand | None]:
        """Return `x` ("m k") quantized along k, and its transpose ("k m") quantized along m, as asked for."""

    def inputs(self, x: Tensor, columns: bool) -> tuple[Operand, Operand | None]:
        """Return a layer's input "... k" quantized along k and, if asked for, its transpose, made once per tensor."""
        return dispatch.made_once(x, self.name, columns, lambda both: self.quantize(_flat(x), True, both))

    @abstractmethod
    def weight(self, q: QuantizedWeight) -> "Weight":
        """Return a weight as the products read it, made once for all passes over it."""

    @abstractmethod
    def multiply(self, a: Operand, b: Operand, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        """Return `a @ b.T + bias` in `dtype`; `a` is scaled per 1×128."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Backend":
        return self


def _flat(x: Tensor) -> Tensor:
    return x.detach().reshape(-1, x.shape[-1])


class Emulated(Backend):
    """Codes multiplied out to fp32: the same numbers on any device, at the cost of fp32 GEMMs."""

    name = "emulate"

    def quantize(self, x: Tensor, rows: bool, columns: bool) -> tuple[Operand | None, Operand | None]:
        return self._along(x) if rows else None, self._along(x.t()) if columns else None

    @staticmethod
    def _along(x: Tensor) -> Operand:
        return Operand(*activations.e4m3_codes(x, (1, BLOCK)), False)

    def weight(self, q: QuantizedWeight) -> Weight:
        return Weight(Operand(q.format.dequantize(q), None, True), None)

    def multiply(self, a: Operand, b: Operand, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        out = F.linear(_dequantized(a), _dequantized(b))
        return (out if bias is None else out.add_(bias)).to(dtype)


def _dequantized(operand: Operand) -> Tensor:
    if operand.scale is None:
        return operand.codes
    expanded = operand.scale.repeat_interleave(BLOCK, dim=1)[:, : operand.codes.shape[1]]
    return operand.codes.float() * expanded


def _operand(made: dispatch.Tile | None) -> Operand | None:
    return None if made is None else Operand(*made, False)


class Torch(Backend):
    """`scaled_mm` of torch over quantizers that take one pass."""

    name = "torch"

    def quantize(self, x: Tensor, rows: bool, columns: bool) -> tuple[Operand | None, Operand | None]:
        along, across = dispatch.e4m3_tiles(x, rows, columns)
        return _operand(along), _operand(across)

    def inputs(self, x: Tensor, columns: bool) -> tuple[Operand, Operand | None]:
        along, across = dispatch.kept_tiles(x, columns)
        return Operand(*along, False), _operand(across)

    def weight(self, q: QuantizedWeight) -> Weight:
        assert q.scales is not None
        forward = Operand(q.codes, gemm.block_scale_layout(q.scales), True)
        return Weight(forward, gemm.block_scale_layout(q.scales.t()))

    def multiply(self, a: Operand, b: Operand, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        assert a.scale is not None
        assert b.scale is not None
        return gemm.scaled_mm_block(a.codes, a.scale, b.codes, b.scale, bias, dtype, b.blocks)


class TransformerEngine(Backend):
    """Transformer Engine's quantization kernels and GEMMs, with fp32 scales as the published weights have."""

    name = "te"

    def __init__(self) -> None:
        from transformer_engine.pytorch import Float8BlockQuantizer
        from transformer_engine.pytorch.cpp_extensions import general_gemm
        from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import (
            Float8BlockwiseQTensorStorage,
        )
        from transformer_engine_torch import DType

        self._dtype, self._gemm, self._storage = DType.kFloat8E4M3, general_gemm, Float8BlockwiseQTensorStorage

        def quantizer(block_scaling_dim: int) -> object:
            # Its default rounds scales up to powers of two; the published weights and the engines do not.
            return Float8BlockQuantizer(
                self._dtype,
                rowwise=True,
                columnwise=True,
                force_pow_2_scales=False,
                amax_epsilon=0.0,
                block_scaling_dim=block_scaling_dim,
            )

        self._vectors, self._squares = quantizer(1), quantizer(2)

    def quantize(self, x: Tensor, rows: bool, columns: bool) -> tuple[Operand | None, Operand | None]:
        padding = -x.shape[0] % BLOCK
        x = F.pad(x, (0, 0, 0, padding)) if padding else x.contiguous()
        quantizer = self._vectors.copy()  # pyright: ignore[reportAttributeAccessIssue]
        quantizer.internal = True
        quantizer.set_usage(rowwise=rows, columnwise=columns)
        made = quantizer(x)
        return (
            Operand(made._rowwise_data, made._rowwise_scale_inv, False) if rows else None,
            Operand(made._columnwise_data, made._columnwise_scale_inv, False) if columns else None,
        )

    def weight(self, q: QuantizedWeight) -> Weight:
        assert q.scales is not None
        return Weight(Operand(q.codes.view(torch.uint8), _padded(q.scales), True), _padded(q.scales.t()))

    def multiply(self, a: Operand, b: Operand, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        # its "TN" takes the second operand first: that one's rows are the result's last dimension
        out = self._gemm(self._tensor(b), self._tensor(a), out_dtype=dtype, layout="TN")[0]
        return out if bias is None else out + bias

    def _tensor(self, operand: Operand) -> object:
        return self._storage(
            operand.codes,
            operand.scale,
            None,
            None,
            self._dtype,
            self._squares if operand.blocks else self._vectors,
            operand.blocks,
        )


def _padded(scale: Tensor) -> Tensor:
    """Return 128×128 scales with their last dimension padded to four, as Transformer Engine's GEMM reads them."""
    return F.pad(scale.float(), (0, -scale.shape[1] % 4), value=1.0).contiguous()


def backend(name: str, one_pass: bool = False, device: torch.device | None = None) -> Backend:
    """Return the backend of that name; `auto` takes the fastest that the device can run.

    Args:
        name: `te`, `torch`, `emulate`, or `auto`.
        one_pass: whether inputs are to be quantized in the kernel of what comes before, which makes torch the fastest.
        device: where the learner is; None is this host's GPU.

    Raises:
        ConfigError: for an unknown name, a GPU without block-scaled FP8, or Transformer Engine missing or too old.
    """
    known = {"emulate": Emulated, "torch": Torch, "te": TransformerEngine}
    if name == "auto":
        usable = _block_gemm_missing(device) is None
        name = ("te" if not one_pass and _te_missing() is None else "torch") if usable else "emulate"
    if name not in known:
        raise ConfigError("There is no such FP8 backend.", expected="auto, te, torch or emulate", given=name)
    missing = None if name == "emulate" else _block_gemm_missing(device)
    if missing is None and name == "te":
        missing = _te_missing()
    if missing is not None:
        raise ConfigError(
            f"The FP8 backend {name} cannot run here: {missing}",
            remedy="Set backend to emulate for the same numbers at fp32 speed, or use another plugin.",
        )
    return known[name]()


def _block_gemm_missing(device: torch.device | None) -> str | None:
    """Return why block-scaled FP8 GEMMs cannot run on the device, None for this host's GPU, or None."""
    if not torch.cuda.is_available():
        return "there is no CUDA device."
    device = device or torch.device("cuda", torch.cuda.current_device())
    if device.type != "cuda":
        return f"the learner is on the device {device.type}."
    if gemm.fp8_block_gemm(device, (BLOCK, BLOCK)):
        return None
    capability = ".".join(map(str, gemm.capability(device.index)))
    return (
        f"it needs compute capability 9.0, CUDA 12.9 and torch.nn.functional.scaled_mm; this is a "
        f"{torch.cuda.get_device_name(device)} ({capability}) with torch {torch.__version__}."
    )


def _te_missing() -> str | None:
    """Return why Transformer Engine cannot be used, or None."""
    from lightning_utilities.core.imports import RequirementCache

    requirement = RequirementCache(TE_REQUIREMENT)
    return None if requirement else f"{requirement}."
