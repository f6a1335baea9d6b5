"""vLLM's own kernels for low-bit layers whose inputs are quantized, so that the learner rounds where the sampler does.

A product of quantized inputs has the sampler's bits only where its own operator makes it: CUTLASS' FP8 adds in another
order than torch's GEMM, and CUTLASS' W4A8 rounds the group scales to FP8. Formats of weights alone are multiplied out
in the learner: Machete and Marlin give the same log-ratios to the sampler (docs/studies/precision.md). Operators are
those of vLLM 0.26 and later; vLLM is imported in functions only.
"""

import logging
from abc import ABC, abstractmethod
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from lit_qrl.errors import ConfigError
from lit_qrl.formats import FP8Row, Int4Group, NumberFormat
from lit_qrl.formats.base import QuantizedWeight
from lit_qrl.formats.kernels import dispatch, gemm
from lit_qrl.formats.scaled import Scaled

log = logging.getLogger(__name__)

Kernel = Literal["auto", "dequantize"]

_HOPPER = (9, 0)


class SamplerKernel(ABC):
    """One of vLLM's kernels: repacks a weight once per version of it, then multiplies."""

    vllm_name: ClassVar[str]
    """Its class in vLLM, as `VLLM_DISABLED_KERNELS` names it."""
    dtypes: ClassVar[tuple[torch.dtype, ...]]
    """Of the inputs."""
    block: ClassVar[int]
    """Of which a weight's sides are multiples."""

    def missing(self, shape: tuple[int, int], dtype: torch.dtype) -> str | None:
        """Return why the kernel cannot multiply inputs of `dtype` by a weight of `shape` (out, in), or None."""
        if gemm.capability(None) != _HOPPER:
            return f"{self.vllm_name} needs compute capability 9.0, this device has {gemm.capability(None)}"
        if dtype not in self.dtypes:
            return f"{self.vllm_name} takes {' and '.join(map(str, self.dtypes))}, not {dtype}"
        if any(side % self.block for side in shape):
            return f"{self.vllm_name} takes in_features and out_features in units of {self.block}, not {shape[::-1]}"
        return None

    @abstractmethod
    def prepare(self, q: QuantizedWeight, dtype: torch.dtype) -> Any:
        """Return the weight as the kernel reads it."""

    @abstractmethod
    def apply(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        """Return `x @ W.T + bias`: "... in" -> "... out", in the dtype of `x`."""

    def kept_input(self, x: Tensor) -> tuple[Tensor, ...] | None:
        """Return the codes and scales that stand for inputs "... in" in the product, or None where the format says."""
        return None


class CutlassW4A8(SamplerKernel):
    """INT4 weights under FP8 activations, in groups of 128; the group scales are rounded to FP8."""

    vllm_name = "CutlassW4A8LinearKernel"
    dtypes = (torch.bfloat16,)
    block = 128

    def prepare(self, q: QuantizedWeight, dtype: torch.dtype) -> Any:
        from vllm import _custom_ops as ops
        from vllm.model_executor.layers.quantization.utils import quant_utils as utils

        assert q.scales is not None
        scales, channel = utils.convert_bf16_scales_to_fp8(_fp8_rows, q.scales.to(dtype).contiguous())
        signed = utils.convert_packed_uint4b8_to_signed_int4_inplace(q.codes.clone())
        codes = ops.cutlass_encode_and_reorder_int4b(signed.contiguous().t())
        packed = ops.cutlass_pack_scale_fp8(scales.t().contiguous().to(torch.float8_e4m3fn))
        return codes, packed, channel

    def apply(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        from vllm import _custom_ops as ops

        codes, scales, channel = weight
        rows, row_scales = _fp8_rows(x.reshape(-1, x.shape[-1]).contiguous())
        out = ops.cutlass_w4a8_mm(
            a=rows,
            b_q=codes,
            b_group_scales=scales,
            b_group_size=self.block,
            a_token_scales=row_scales,
            b_channel_scales=channel,
        )
        out = out if bias is None else out.add_(bias)
        return out.view(*x.shape[:-1], out.shape[-1])


class CutlassFP8Row(SamplerKernel):
    """FP8 weights with a scale per row under FP8 activations with a scale per token."""

    vllm_name = "CutlassFP8ScaledMMLinearKernel"
    dtypes = (torch.bfloat16, torch.float16)
    block = 16

    def prepare(self, q: QuantizedWeight, dtype: torch.dtype) -> Any:
        assert q.scales is not None
        return q.codes.contiguous().t(), q.scales.float().contiguous()

    def apply(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        from vllm import _custom_ops as ops

        (codes, scales), (rows, row_scales) = weight, self.kept_input(x)
        out = ops.cutlass_scaled_mm(rows, codes, scale_a=row_scales, scale_b=scales, out_dtype=x.dtype, bias=bias)
        return out.view(*x.shape[:-1], out.shape[-1])

    def kept_input(self, x: Tensor) -> tuple[Tensor, Tensor]:
        def make(columns: bool) -> tuple[Any, None]:
            return _fp8_rows(x.detach().reshape(-1, x.shape[-1]).contiguous()), None

        # once for all layers that read the same tensor: q, k and v; gate and up
        return dispatch.made_once(x, self.vllm_name, False, make)[0]


def _fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return E4M3 codes and a scale per row, as vLLM's op rounds them."""
    from vllm import _custom_ops as ops

    return ops.scaled_fp8_quant(x, None, use_per_token_if_dynamic=True)


_KERNELS: dict[NumberFormat, SamplerKernel] = {FP8Row(): CutlassFP8Row(), Int4Group(128, "fp8"): CutlassW4A8()}


def choose(
    format: NumberFormat, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> SamplerKernel | str:
    """Return the kernel that vLLM multiplies such a layer with, or why there is none.

    Args:
        format: of the weight.
        shape: (out, in) of the weight.
        dtype: of the inputs.
        device: of the inputs.

    >>> choose(FP8Row(), (128, 128), torch.bfloat16, torch.device("cpu"))
    'the learner is on cpu, and the kernels are CUDA ones'
    """
    if device.type != "cuda":
        return f"the learner is on {device.type}, and the kernels are CUDA ones"
    if not installed():
        return "vLLM with its CUDA kernels is not installed"
    from vllm import envs

    found = _KERNELS.get(format)
    if found is None:
        return f"no kernel is known for {format}, but for {' and '.join(map(str, _KERNELS))}"
    if found.vllm_name in envs.VLLM_DISABLED_KERNELS:
        return f"{found.vllm_name} is in VLLM_DISABLED_KERNELS"
    return found.missing(shape, dtype) or found


class KernelChoice:
    """Which kernel the layers of one plugin take, and what was said about it in the log.

    Args:
        kernel: the plugin's option.
        format: of the weights.

    Raises:
        ConfigError: for a kernel that there is not.
    """

    def __init__(self, kernel: str, format: NumberFormat) -> None:
        if kernel not in get_args(Kernel):
            raise ConfigError(
                "There is no such kernel in the learner.",
                expected=" or ".join(get_args(Kernel)),
                given=kernel,
                remedy="Set kernel to auto.",
            )
        self.kernel, self.format = kernel, format
        self.sampler = "torch"
        self.exact = False  # learner and sampler agree to the last bit, so that nothing may be multiplied otherwise
        self._told: set[str] = set()

    def follow(self, module: Any) -> None:
        """Take the kernels of the engine that samples for a Lightning module, where it has one."""
        engine = getattr(getattr(getattr(module, "_trainer", None), "datamodule", None), "engine", None)
        self.sampler = getattr(engine, "kernels", self.sampler)
        self.exact = self.sampler == "vllm" and getattr(engine, "batch_invariant", False)

    def pick(self, name: str, shape: tuple[int, int], x: Tensor) -> SamplerKernel | None:
        """Return the kernel for a layer and its input, or None where the weight is multiplied out."""
        if self.kernel == "dequantize" or self.sampler != "vllm" or not self.format.quantizes_activations:
            return None
        found = choose(self.format, shape, x.dtype, x.device)
        told = found if isinstance(found, str) else found.vllm_name
        own = isinstance(self.format, Scaled) and self.format.has_gemm(x.device, shape)  # the sampler takes it, too
        if isinstance(found, str) and self.exact and not own:
            raise ConfigError(
                f"The learner cannot multiply {name} {shape} by the sampler's kernel: {found}.",
                expected="the same kernel on both sides, as data.engine.batch_invariant asks for",
                given=f"{self.format.name}, multiplied out",
                remedy="Exclude the layer in the plugin, or set data.engine.batch_invariant to false.",
            )
        if told not in self._told:
            self._told.add(told)
            if isinstance(found, str):
                log.warning("%s is multiplied out in the learner, unlike in the sampler: %s.", name, found)
            else:
                log.info("%s takes the sampler's kernel %s.", name, told)
        return None if isinstance(found, str) else found


@lru_cache
def installed() -> bool:
    """Return True when vLLM with its CUDA kernels can be imported."""
    if find_spec("vllm") is None:
        return False
    from vllm import _custom_ops  # noqa: F401  registers the kernels
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())
