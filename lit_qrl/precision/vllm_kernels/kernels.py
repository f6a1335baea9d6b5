"""vLLM's own kernels for packed weights, so that the learner's forward pass rounds where the sampler does.

Weight-only formats are multiplied on the GPU by kernels that unpack codes on the way to the tensor cores. Multiplying
the weight out first and calling the bf16 GEMM gives the same products in another order, and for W4A8 other products:
vLLM rounds the group scales to FP8 there. Here the very ops are called, of vLLM 0.26 and later; vLLM is imported in
functions only.
"""

from abc import ABC, abstractmethod
from functools import lru_cache
from inspect import signature
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_qrl.formats import MXFP4, NVFP4, FP8Row, Int4Group, NumberFormat
from lit_qrl.formats.base import QuantizedWeight
from lit_qrl.formats.kernels import dispatch

_HALF = (torch.bfloat16, torch.float16)
# Machete's prepacked blocks, and the sides that CUTLASS' W4A8 and FP8 take: (in, out).
_MACHETE_BLOCK, _W4A8_BLOCK, _FP8_BLOCK = (64, 128), (128, 128), (16, 16)
_MARLIN_GROUPS, _MACHETE_GROUPS, _W4A8_GROUP = (32, 64, 128), (64, 128), 128
_HOPPER = (9, 0)


class SamplerKernel(ABC):
    """One of vLLM's kernels: repacks a weight once per version of it, then multiplies."""

    name: ClassVar[str]
    vllm_name: ClassVar[str]
    """Its class in vLLM, as `VLLM_DISABLED_KERNELS` names it."""

    @abstractmethod
    def missing(self, format: NumberFormat, shape: tuple[int, int], dtype: torch.dtype) -> str | None:
        """Return why the kernel cannot multiply inputs of `dtype` by a weight of `shape` (out, in), or None."""

    @abstractmethod
    def prepare(self, q: QuantizedWeight, dtype: torch.dtype) -> Any:
        """Return the weight as the kernel reads it."""

    @abstractmethod
    def multiply(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        """Return `x @ W.T + bias`: "m in" -> "m out", in the dtype of `x`."""

    def apply(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        """Return `x @ W.T + bias`: "... in" -> "... out"."""
        rows = x.reshape(-1, x.shape[-1])
        out = self.multiply(rows.contiguous(), weight, bias)
        return out.view(*x.shape[:-1], out.shape[-1])

    def kept_input(self, x: Tensor) -> tuple[Tensor, ...] | None:
        """Return the codes and scales that stand for inputs "... in" in the product, or None where the format says."""
        return None


class Machete(SamplerKernel):
    """INT4 weights on compute capability 9.0."""

    name = "machete"
    vllm_name = "MacheteLinearKernel"

    def missing(self, format: NumberFormat, shape: tuple[int, int], dtype: torch.dtype) -> str | None:
        if not isinstance(format, Int4Group) or format.activations is not None:
            return "Machete multiplies int4_group weights with activations left alone"
        if _capability() != _HOPPER:
            return f"Machete needs compute capability 9.0, this device has {_capability()}"
        if format.group_size not in _MACHETE_GROUPS:
            return f"Machete takes groups of {_MACHETE_GROUPS}, not {format.group_size}"
        if dtype not in _HALF:
            return f"Machete takes bf16 and fp16, not {dtype}"
        return _unaligned(shape, _MACHETE_BLOCK, "Machete")

    def prepare(self, q: QuantizedWeight, dtype: torch.dtype) -> Any:
        from vllm import _custom_ops as ops
        from vllm.scalar_type import scalar_types

        assert q.scales is not None
        assert isinstance(q.format, Int4Group)
        codes = ops.machete_prepack_B(
            q.codes.contiguous().t(), a_type=dtype, b_type=scalar_types.uint4b8, group_scales_type=dtype
        )
        return codes, q.scales.to(dtype).t().contiguous(), q.format.group_size, scalar_types.uint4b8

    def multiply(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        from vllm import _custom_ops as ops

        codes, scales, group_size, kind = weight
        out = ops.machete_mm(
            a=x, b_q=codes, b_type=kind, b_group_scales=scales, b_group_zeros=None, b_group_size=group_size
        )
        return out if bias is None else out.add_(bias)


class MarlinInt4(SamplerKernel):
    """INT4 weights on compute capability 7.5 and later."""

    name = "marlin"
    vllm_name = "MarlinLinearKernel"

    def missing(self, format: NumberFormat, shape: tuple[int, int], dtype: torch.dtype) -> str | None:
        if not isinstance(format, Int4Group) or format.activations is not None:
            return "this Marlin multiplies int4_group weights with activations left alone"
        if format.group_size not in _MARLIN_GROUPS:
            return f"Marlin takes groups of {_MARLIN_GROUPS}, not {format.group_size}"
        return _no_marlin(dtype)

    def prepare(self, q: QuantizedWeight, dtype: torch.dtype) -> Any:
        from vllm import _custom_ops as ops
        from vllm.model_executor.layers.quantization.utils import marlin_utils as utils

        assert q.scales is not None
        assert isinstance(q.format, Int4Group)
        (n, k), group = q.shape, q.format.group_size
        padded_n, padded_k = utils.marlin_padded_nk(n, k, group)
        packed = utils.marlin_pad_qweight(q.codes.t().contiguous(), n, k, padded_n, padded_k)
        repack: Any = ops.gptq_marlin_repack
        codes = repack(
            packed,
            size_k=padded_k,
            size_n=padded_n,
            num_bits=4,
            **_known(repack, perm=_empty(q.codes.device), is_a_8bit=False),
        )
        scales = utils.marlin_pad_scales(q.scales.to(dtype).t().contiguous(), n, k, padded_n, padded_k, group)
        return codes, utils.marlin_permute_scales(scales, size_k=padded_k, size_n=padded_n, group_size=group), (n, k)

    def multiply(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        from vllm.model_executor.layers.quantization.utils import marlin_utils as utils
        from vllm.scalar_type import scalar_types

        codes, scales, (n, k) = weight
        apply: Any = utils.apply_gptq_marlin_linear
        nothing = _empty(x.device)
        old = _known(apply, g_idx=nothing, g_idx_sort_indices=nothing, workspace=_workspace(x.device), is_k_full=True)
        return apply(
            input=x,
            weight=codes,
            weight_scale=scales,
            weight_zp=nothing,
            wtype=scalar_types.uint4b8,
            input_size_per_partition=k,
            output_size_per_partition=n,
            bias=_marlin_bias(bias, n, k, codes),
            **old,
        )


class MarlinFP4(SamplerKernel):
    """NVFP4 and MXFP4 weights on compute capability 7.5 and later."""

    name = "marlin"
    vllm_name = "MarlinNvFp4LinearKernel"

    def missing(self, format: NumberFormat, shape: tuple[int, int], dtype: torch.dtype) -> str | None:
        if not isinstance(format, NVFP4 | MXFP4):
            return "this Marlin multiplies nvfp4 and mxfp4 weights"
        return _no_marlin(dtype)

    def prepare(self, q: QuantizedWeight, dtype: torch.dtype) -> Any:
        from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4 as utils

        assert q.scales is not None
        layer: Any = nn.Module()
        layer.output_size_per_partition, layer.input_size_per_partition = q.shape
        layer.params_dtype = dtype
        layer.weight = nn.Parameter(q.codes, requires_grad=False)
        layer.weight_scale = nn.Parameter(q.scales, requires_grad=False)
        if q.global_scale is not None:  # stored as a divisor
            layer.weight_global_scale = nn.Parameter(1.0 / q.global_scale.max().float(), requires_grad=False)
        utils.prepare_fp4_layer_for_marlin(layer)
        held = {name: getattr(layer, name).data for name in ("weight", "weight_scale")}
        scale = getattr(layer, "weight_global_scale", None)
        return SimpleNamespace(**held, weight_global_scale=None if scale is None else scale.data, shape=q.shape)

    def multiply(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4 as utils

        n, k = weight.shape
        return utils.apply_fp4_marlin_linear(
            input=x,
            weight=weight.weight,
            weight_scale=weight.weight_scale,
            weight_global_scale=weight.weight_global_scale,
            workspace=_workspace(x.device),
            size_n=n,
            size_k=k,
            bias=_marlin_bias(bias, n, k, weight.weight),
        )


class CutlassW4A8(SamplerKernel):
    """INT4 weights under FP8 activations on compute capability 9.0; the group scales are rounded to FP8."""

    name = "cutlass"
    vllm_name = "CutlassW4A8LinearKernel"

    def missing(self, format: NumberFormat, shape: tuple[int, int], dtype: torch.dtype) -> str | None:
        if not isinstance(format, Int4Group) or format.activations != "fp8":
            return "this kernel multiplies int4_group weights under FP8 activations"
        if _capability() != _HOPPER:
            return f"CUTLASS' W4A8 needs compute capability 9.0, this device has {_capability()}"
        if format.group_size != _W4A8_GROUP:
            return f"CUTLASS' W4A8 takes groups of {_W4A8_GROUP}, not {format.group_size}"
        if dtype != torch.bfloat16:
            return f"CUTLASS' W4A8 takes bf16, not {dtype}"
        return _unaligned(shape, _W4A8_BLOCK, "CUTLASS' W4A8")

    def prepare(self, q: QuantizedWeight, dtype: torch.dtype) -> Any:
        from vllm import _custom_ops as ops
        from vllm.model_executor.layers.quantization.utils import quant_utils as utils

        assert q.scales is not None
        scales, channel = utils.convert_bf16_scales_to_fp8(_fp8_rows, q.scales.to(dtype).contiguous())
        signed = utils.convert_packed_uint4b8_to_signed_int4_inplace(q.codes.clone())
        codes = ops.cutlass_encode_and_reorder_int4b(signed.contiguous().t())
        packed = ops.cutlass_pack_scale_fp8(scales.t().contiguous().to(torch.float8_e4m3fn))
        return codes, packed, channel

    def multiply(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        from vllm import _custom_ops as ops

        codes, scales, channel = weight
        rows, row_scales = _fp8_rows(x)
        out = ops.cutlass_w4a8_mm(
            a=rows,
            b_q=codes,
            b_group_scales=scales,
            b_group_size=_W4A8_GROUP,
            a_token_scales=row_scales,
            b_channel_scales=channel,
        )
        return out if bias is None else out.add_(bias)


class CutlassFP8Row(SamplerKernel):
    """FP8 weights with a scale per row under FP8 activations with a scale per token, on compute capability 9.0."""

    name = "cutlass"
    vllm_name = "CutlassFP8ScaledMMLinearKernel"

    def missing(self, format: NumberFormat, shape: tuple[int, int], dtype: torch.dtype) -> str | None:
        if not isinstance(format, FP8Row):
            return "this kernel multiplies fp8_row weights"
        if _capability() != _HOPPER:
            return f"CUTLASS' FP8 needs compute capability 9.0 here, this device has {_capability()}"
        if dtype not in _HALF:
            return f"CUTLASS' FP8 returns bf16 and fp16, not {dtype}"
        return _unaligned(shape, _FP8_BLOCK, "CUTLASS' FP8")

    def prepare(self, q: QuantizedWeight, dtype: torch.dtype) -> Any:
        assert q.scales is not None
        return q.codes.contiguous().t(), q.scales.float().contiguous()

    def multiply(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        return self._product(_fp8_rows(x), weight, bias, x.dtype)

    def apply(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        out = self._product(self.kept_input(x), weight, bias, x.dtype)
        return out.view(*x.shape[:-1], out.shape[-1])

    def kept_input(self, x: Tensor) -> tuple[Tensor, Tensor]:
        def make(columns: bool) -> tuple[Any, None]:
            return _fp8_rows(x.detach().reshape(-1, x.shape[-1]).contiguous()), None

        # once for all layers that read the same tensor: q, k and v; gate and up
        return dispatch.made_once(x, self.vllm_name, False, make)[0]

    @staticmethod
    def _product(rows: tuple[Tensor, Tensor], weight: Any, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        from vllm import _custom_ops as ops

        codes, scales = weight
        return ops.cutlass_scaled_mm(rows[0], codes, scale_a=rows[1], scale_b=scales, out_dtype=dtype, bias=bias)


@lru_cache
def _capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability()


def _unaligned(shape: tuple[int, int], block: tuple[int, int], name: str) -> str | None:
    inputs, outputs = block
    if shape[1] % inputs or shape[0] % outputs:
        return f"{name} takes in_features in units of {inputs} and out_features of {outputs}, not {shape[::-1]}"
    return None


def _no_marlin(dtype: torch.dtype) -> str | None:
    # any shape will do: it is padded to the kernel's tiles
    return None if dtype in _HALF else f"Marlin takes bf16 and fp16, not {dtype}"


def _fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return E4M3 codes and a scale per row, as vLLM's op rounds them."""
    from vllm import _custom_ops as ops

    return ops.scaled_fp8_quant(x, None, use_per_token_if_dynamic=True)


def _marlin_bias(bias: Tensor | None, n: int, k: int, codes: Tensor) -> Tensor | None:
    """Return the bias in the order in which Marlin writes its columns."""
    if bias is None:
        return None
    from vllm.model_executor.layers.quantization.utils import marlin_utils as utils

    padded_n, _ = utils.marlin_repacked_nk(codes, 4)
    return utils.marlin_permute_bias(F.pad(bias, (0, padded_n - n)))


@lru_cache
@torch.inference_mode(False)
def _workspace(device: torch.device) -> Tensor:
    # zeroed locks that Marlin gives back as it found them: one per device serves calls in the order of a stream
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_make_workspace_new

    return marlin_make_workspace_new(device)


@lru_cache
@torch.inference_mode(False)
def _empty(device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.int, device=device)


def _known(function: Any, **options: Any) -> dict[str, Any]:
    """Return those of `options` that this version's function takes."""
    taken = signature(function).parameters
    return {name: value for name, value in options.items() if name in taken}
