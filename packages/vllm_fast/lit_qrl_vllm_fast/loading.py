"""What makes the start of an engine and its publishes shorter."""

import os
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from lit_qrl.rollout.vllm.patches import Patch

_MOST = 2**31 - 1
"""Numbers that the repacking kernel's 32-bit indices reach."""
# E4M3's largest number times 2^7, by which Marlin raises the scales so that their top bit is set.
_RAISED = 2**7
_LARGEST = 448 * _RAISED

# ------------------------------------------------------------------------------------------- Marlin's repacking


def _at_once(original: Any, name: str, laid: Callable[[Tensor], Tensor]) -> Any:
    """Return a repacking of experts that goes through all of them in one launch.

    They go one by one where each has an order of inputs of its own, or where they are too many for one launch.

    Args:
        original: repacking.
        name: of its argument for the weights, experts first.
        laid: from those to one matrix of them all, "1 …".
    """
    bind = signature(original).bind

    def repack(*args: Any, **kwargs: Any) -> Tensor:
        given = bind(*args, **kwargs).arguments
        weight, order = given[name], given.get("perm")
        if (order is not None and order.numel() > 0) or weight.numel() > _MOST:
            return original(**given)
        count = len(weight)
        given |= {name: laid(weight), "size_k": count * given["size_k"]}
        return original(**given).unflatten(1, (count, -1))[0]

    return repack


def integers_at_once(original: Any) -> Any:
    """Return the repacking of a layer's experts of 4-bit integers, which goes through all of them in one launch.

    The kernel goes by tiles of 16 inputs and knows no expert, so that experts which lie one after another along their
    inputs are one matrix to it; the scales' order is within a row.
    """
    return _at_once(original, "b_q_weight", lambda weight: weight.reshape(1, -1, weight.shape[2]))  # "experts in/8 out"


def floats_at_once(original: Any) -> Any:
    """Return the repacking of a layer's experts of 4-bit floats, which goes through all of them in one launch."""
    return _at_once(original, "weight", lambda weight: weight.transpose(0, 1).reshape(1, weight.shape[1], -1))


def permuted_stack(s: Tensor, size_k: int, size_n: int, group_size: int, is_a_8bit: bool = False) -> Tensor:
    """Return scales "experts groups n", those of each expert in the order in which Marlin's threads read them.

    >>> permuted_stack(torch.arange(128.0).view(2, 1, 64), 32, 64, 16)[1, 0, :4].tolist()
    [64.0, 72.0, 80.0, 88.0]
    """
    return permuted_scales(s.flatten(0, 1), size_k, size_n, group_size, is_a_8bit).view(s.shape)


def permuted_scales(s: Tensor, size_k: int, size_n: int, group_size: int, is_a_8bit: bool = False) -> Tensor:
    """Return scales "groups n" in the order in which Marlin's threads read them.

    >>> permuted_scales(torch.arange(64.0).view(1, 64), 32, 64, 16)[0, :4].tolist()
    [0.0, 8.0, 16.0, 24.0]
    """
    grouped = group_size < size_k and group_size != -1 and not is_a_8bit
    return (_by_columns(s) if grouped else _by_pairs(s)).reshape(-1, size_n).contiguous()


def permuted_bias(bias: Tensor) -> Tensor:
    """Return a bias " n" in the order in which Marlin's threads read it."""
    return _by_pairs(bias).reshape(bias.shape).contiguous()


def _by_columns(s: Tensor) -> Tensor:
    """Transpose each run of 64 numbers as an 8×8 matrix."""
    return s.reshape(-1, 8, 8).transpose(1, 2)


def _by_pairs(s: Tensor) -> Tensor:
    """Transpose each run of 32 numbers as a 4×4 matrix of pairs."""
    return s.reshape(-1, 4, 4, 2).transpose(1, 2)


def processed_ahead(original: Any) -> Any:
    """Return `nvfp4_marlin_process_scales`, with numbers that stay on the device."""
    del original

    def process_scales(scales: Tensor, scale_factor: float | None = None, a_dtype: torch.dtype | None = None) -> Any:
        made, factor = processed_scales(scales, a_dtype, scale_factor)  # experts share a factor, which is given
        return made, factor if scale_factor is None else scale_factor

    return process_scales


def processed_scales(
    scales: Tensor, dtype: torch.dtype | None = None, given: float | None = None
) -> tuple[Tensor, Tensor | float]:
    """Return permuted NVFP4 scales as the bytes that Marlin reads, and the power of two that they were raised by, " ".

    A byte is the upper half of the fp16 number 2^7 · scale without its sign; scales whose largest is below 448 are
    raised first, so that small ones keep their digits.

    Args:
        scales: "groups n", not negative.
        dtype: of the activations; fp16 has no room to raise anything.
        given: the power of two, where it is known.
    """
    half = scales.to(torch.half)
    half = half.reshape(-1, 2, 2).transpose(1, 2).reshape(half.shape)
    factor = _room(half, dtype) if given is None else given
    raised = (half.float() * factor).to(torch.half) * _RAISED
    raised = raised.masked_fill(raised < 2, 0)
    return (raised.view(torch.int16) << 1).view(torch.float8_e4m3fn)[:, 1::2].contiguous(), factor


def _room(half: Tensor, dtype: torch.dtype | None) -> Tensor:
    largest = (half.float() * _RAISED).amax()
    factor = torch.ones_like(largest)
    if dtype == torch.half:
        return factor
    room = (_LARGEST / largest).log2().floor().exp2()
    return torch.where((largest > 0) & (largest < _LARGEST), room, factor)


def weight_only(original: Any) -> Any:
    """Return the processing of an NVFP4 layer, which does not ask the device whether the global scales are equal."""

    def process_weights_after_loading(scheme: Any, layer: nn.Module) -> None:
        if not getattr(scheme, "use_a16", False):
            original(scheme, layer)
            return
        packed, global_scales = layer.weight_packed, layer.weight_global_scale
        del layer.weight_packed
        layer.weight = packed
        # The parts of a fused layer are published with one global scale, so which is taken makes no difference.
        inverse = 1.0 / global_scales.max().to(torch.float32)  # pyright: ignore[reportCallIssue]
        layer.weight_global_scale = nn.Parameter(inverse, requires_grad=False)
        scheme.kernel.process_weights_after_loading(layer)

    return process_weights_after_loading


# -------------------------------------------------------------------------------------------- starts and reloads


def inspected_here(original: Any) -> Any:
    """Return `inspect_model_cls`, which imports a model's class in this process, where it is the engine's own."""

    def inspect_model_cls(model: Any) -> Any:
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
            return original(model)
        from vllm.model_executor.models.registry import _ModelInfo

        return _ModelInfo.from_model_cls(model.load_model_cls())

    return inspect_model_cls


_UTILS = "vllm.model_executor.layers.quantization.utils.marlin_utils"
_SCHEMES = "vllm.model_executor.layers.quantization.compressed_tensors.schemes"
_NVFP4 = f"{_SCHEMES}.compressed_tensors_w4a4_nvfp4:CompressedTensorsW4A4Fp4"
_MOE, _FLOATS = "vllm._custom_ops:gptq_marlin_moe_repack", f"{_UTILS}_fp4:_repack_marlin_experts"
_SCALES = f"{_UTILS}_fp4:nvfp4_marlin_process_scales"
_REGISTRY = "vllm.model_executor.models.registry"
_STACK = "vllm.model_executor.layers.fused_moe.oracle.int_wna16:marlin_moe_permute_scales"
CHANGES = (
    Patch(
        "expert_repacking",
        "experts are repacked one after another, with a launch, a copy and a wait of the host for each",
        "12,288 waits in a publish of 30B-A3B in int4_group, of 3.4 to 5.8 s",
        {_MOE: integers_at_once, _FLOATS: floats_at_once, _STACK: lambda original: permuted_stack},
        device="cuda",
        sources={_MOE: ("92d40bcf", "db479a9d"), _FLOATS: ("87ae1979", "80b1c003"), _STACK: ("f248df0f",)},
    ),
    Patch(
        "nvfp4_repacking",
        "the device is asked several numbers of every NVFP4 layer while it is repacked, and the host waits for each",
        "a publish at 7B took 0.71 s before this and the kernel for codes, 0.29 s with both (H200)",
        {
            _SCALES: processed_ahead,
            f"{_UTILS}_fp4:marlin_permute_scales": lambda original: permuted_scales,
            f"{_UTILS}_fp4:marlin_permute_bias": lambda original: permuted_bias,
            f"{_NVFP4}.process_weights_after_loading": weight_only,
        },
        [f"{_NVFP4}.use_a16"],
        sources={
            _SCALES: ("746d6596",),
            f"{_UTILS}_fp4:marlin_permute_scales": ("04784599",),
            f"{_UTILS}_fp4:marlin_permute_bias": ("8dfe1fd7",),
            f"{_NVFP4}.process_weights_after_loading": ("6be62fe5",),
        },
    ),
    Patch(
        "model_inspection",
        "a model's class is imported in a process of its own to see what it can do, and then in this one anyway",
        "half a minute of a first start on a host",
        {f"{_REGISTRY}:_LazyRegisteredModel.inspect_model_cls": inspected_here},
        [f"{_REGISTRY}:_ModelInfo.from_model_cls"],
    ),
    Patch(
        "reload_sizes",
        "a reload adds up what waits of all layers at every tensor, to warn of it",
        "a first publish of 30B-A3B in nvfp4 came to the eleventh of 48 layers in 140 s",
        {"vllm.model_executor.model_loader.reload.layerwise:get_info_size": lambda original: lambda info: 0},
        fixed="0.28",
    ),
)
