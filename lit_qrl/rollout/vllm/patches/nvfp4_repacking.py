"""Marlin's repacking of NVFP4 weights with the host running ahead.

vLLM asks the device several numbers of every layer while it repacks (are the global scales equal, is a scale negative,
which is the largest) and sends it lists of indices, and each time the host waits until all work before is done. What
is here computes the same numbers on the device alone.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lit_qrl.rollout.vllm.patches.patch import Patch, Versions

# E4M3's largest number times 2^7, by which Marlin raises the scales so that their top bit is set.
_RAISED = 2**7
_LARGEST = 448 * _RAISED
_UTILS = "vllm.model_executor.layers.quantization.utils.marlin_utils_fp4"
_SCHEME = "vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4"


def _ahead(original: Any) -> Any:
    def process_scales(scales: Tensor, scale_factor: float | None = None, a_dtype: torch.dtype | None = None) -> Any:
        made, factor = processed_scales(scales, a_dtype, scale_factor)  # experts share a factor, which is given
        return made, factor if scale_factor is None else scale_factor

    return process_scales


def _weight_only(original: Any) -> Any:
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


_CLASS = f"{_SCHEME}:CompressedTensorsW4A4Fp4"
PATCH = Patch(
    __name__,
    Versions("0.26"),
    "vLLM repacks NVFP4 without asking the device",
    {
        f"{_UTILS}:nvfp4_marlin_process_scales": _ahead,
        f"{_UTILS}:marlin_permute_scales": lambda original: permuted_scales,
        f"{_UTILS}:marlin_permute_bias": lambda original: permuted_bias,
        f"{_CLASS}.process_weights_after_loading": _weight_only,
    },
    [f"{_CLASS}.use_a16"],
)
