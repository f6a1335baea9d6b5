"""What the formats of one 8-bit code per weight share: scales, GEMM or emulation, and the tensors of a checkpoint."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_qrl.formats.base import NumberFormat, PreparedWeight, QuantizedWeight, compressed_tensors_config
from lit_qrl.formats.kernels import activations, dispatch, gemm
from lit_qrl.formats.numerics import E4M3_MAX, in_blocks, of_blocks, require_finite, scale_from_amax, to_e4m3, with_bias


class Scaled(NumberFormat):
    """A weight is its code times a scale; activations become codes of the same kind on the fly.

    A subclass says which code and which GEMM, and what a scale covers where that is not an output row.
    """

    bits_per_weight: ClassVar[float] = 8.0
    quantizes_activations: ClassVar[bool] = True
    kind: ClassVar[Literal["float", "int"]]
    steps: ClassVar[float]
    """What the largest magnitude under a scale is divided by."""
    kernel: ClassVar[Literal["fp8_blocks", "fp8_rows"] | None] = None
    """Makes codes and scales of a weight at once, with the bits of plain operations, where a device has it.

    A row or block with NaN or inf has a scale that is not finite.
    """
    codes_of: ClassVar[str] = ""
    """The source of input codes that a norm may make in passing, of those in `formats/kernels/dispatch.py`."""

    @property
    def packs(self) -> bool:
        return True

    def extent(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return of how many rows and columns of a weight a scale is."""
        return (1, shape[1])

    def scale_shape(self, shape: tuple[int, int]) -> tuple[int, ...]:
        """Return the shape of the scales of a weight."""
        rows, columns = self.extent(shape)
        return (-(-shape[0] // rows), -(-shape[1] // columns))

    @abstractmethod
    def encode(self, quotient: Tensor) -> Tensor:
        """Return the codes of a weight that was divided by its scales."""

    @torch.no_grad()
    def quantize(self, weight: Tensor, shared_amax: Tensor | None = None) -> QuantizedWeight:
        weight, shape = weight.detach(), (weight.shape[0], weight.shape[1])
        made = None if self.kernel is None else dispatch.fp8_weights(weight, self.kernel)
        if made is not None:
            require_finite(made[1])
            return QuantizedWeight(*made, None, self, shape)
        blocks = in_blocks(weight, self.extent(shape))
        amax = blocks.abs().amax(dim=(1, 3))
        require_finite(amax)
        if shared_amax is not None and self.shares_amax:
            amax = shared_amax.to(device=weight.device, dtype=weight.dtype).reshape(1, 1)
        scale = scale_from_amax(amax, self.steps)
        codes = of_blocks(self.encode(blocks / scale[:, None, :, None]), shape)
        return QuantizedWeight(codes, scale.reshape(self.scale_shape(shape)), None, self, shape)

    def dequantize(self, q: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
        assert q.scales is not None
        return dispatch.scaled_values(q.codes, q.scales, dtype, self.extent(q.shape))

    @abstractmethod
    def has_gemm(self, device: torch.device, shape: tuple[int, int]) -> bool:
        """Return True when the device multiplies codes by codes and the weight's shape fits."""

    def gemm_scales(self, scales: Tensor) -> Tensor:
        """Return the scales as the GEMM reads them."""
        return scales.float()

    @abstractmethod
    def multiply(self, x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        """Return the device's product of "... in" and the weight, plus `bias`: "m out", dtype of `x`."""

    def multiply_few(self, x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        """Return `multiply`, by a product that is faster for few rows where there is one; it adds in another order."""
        return self.multiply(x, codes, scale, bias)

    @abstractmethod
    def emulate(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Return the same product of "m in" and the dequantized weight in fp32."""

    def prepare(self, q: QuantizedWeight, dtype: torch.dtype) -> PreparedWeight:
        assert q.scales is not None
        if self.has_gemm(q.codes.device, q.shape):
            return PreparedWeight(q.codes, self.gemm_scales(q.scales), native=True)
        return PreparedWeight(self.dequantize(q))

    def apply(self, x: Tensor, prepared: PreparedWeight, bias: Tensor | None = None) -> Tensor:
        if prepared.native:
            assert prepared.scale is not None
            out = self.multiply(x, prepared.operand, prepared.scale, bias)
        else:
            out = with_bias(self.emulate(x.reshape(-1, x.shape[-1]), prepared.operand), bias, x.dtype)
        return out.view(*x.shape[:-1], out.shape[-1])

    def granularity(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what a scale covers of weights and of activations, in the words of compressed-tensors."""
        return {"strategy": "channel"}, {"strategy": "token"}

    def quantization_config(self, ignore: Sequence[str] = ("lm_head",)) -> dict[str, Any]:
        code = {"num_bits": 8, "type": self.kind}
        weights, inputs = ({**code, **one} for one in self.granularity())
        return compressed_tensors_config(f"{self.kind}-quantized", weights=weights, activations=inputs, ignore=ignore)


class ScaledE4M3(Scaled):
    """FP8 E4M3 codes; as it stands activations have a scale per token."""

    kind = "float"
    steps = E4M3_MAX

    @property
    def per_token(self) -> bool:
        """True for one scale per token, False for one per call."""
        return True

    def encode(self, quotient: Tensor) -> Tensor:
        return to_e4m3(quotient)

    def input_extent(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return of how many rows and columns of inputs "m in" a scale is."""
        return (1 if self.per_token else shape[0], shape[1])

    def has_gemm(self, device: torch.device, shape: tuple[int, int]) -> bool:
        return gemm.fp8_gemm(device, shape)

    def multiply(self, x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        return gemm.scaled_mm(*self.input_codes(x), codes, scale, bias, x.dtype)

    def multiply_few(self, x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        here = dispatch.available(x, "few_rows") and gemm.FP8_BLOCKS.met(x.device)
        if not here or not gemm.few_rows(x.numel() // x.shape[-1], *codes.shape, by_rows=self.rows_together == 1):
            return self.multiply(x, codes, scale, bias)
        from lit_qrl.formats.kernels import products_triton

        return products_triton.product(*self.input_codes(x), codes, self.plain_scales(scale), bias, x.dtype)

    def plain_scales(self, scale: Tensor) -> Tensor:
        """Return what `gemm_scales` made, as `scale_shape` has it."""
        return scale

    def input_codes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes "m in" and scales of inputs "... in", as the GEMM takes them."""

        def make(columns: bool) -> tuple[Any, None]:
            return dispatch.e4m3_inputs(x.detach().reshape(-1, x.shape[-1]), self.per_token), None

        # once for all layers that read the same tensor: q, k and v; gate and up
        return dispatch.made_once(x, dispatch.TOKENS if self.per_token else "whole", False, make)[0]

    def emulate(self, rows: Tensor, weight: Tensor) -> Tensor:
        codes, scale = activations.e4m3_rounded(rows, self.input_extent(rows.shape))
        return F.linear(codes, weight).mul_(scale)

    def kept_input(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.input_codes(x) if dispatch.available_for_e4m3(x, "values") else (x,)

    def dequantized_input(self, x: Tensor) -> Tensor:
        return self.dequantized_kept(self.kept_input(x), x.dtype).view(x.shape)

    def dequantized_kept(self, kept: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        if len(kept) == 1:
            rows = kept[0].reshape(-1, kept[0].shape[-1])
            return activations.e4m3_dequantized(rows, self.input_extent(rows.shape)).to(dtype).view(kept[0].shape)
        codes, scales = kept
        return dispatch.scaled_values(codes, scales, dtype, self.input_extent(codes.shape))
