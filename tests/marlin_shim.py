"""NVFP4 in Marlin's own layout on the CPU build of vLLM: its repacking in Python, and a GEMM that multiplies out."""

from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from lit_qrl.formats.numerics import fp4_values, unpack_nibbles
from lit_qrl.precision.vllm_kernels.borrowed import marlin_codes, marlin_scales
from tests import vllm_cpu_shim
from tests.format_rows import override

# vLLM multiplies the global scale of a bf16 layer by this: the difference of the exponents' biases, less 7.
GLOBAL = 2.0**119


@contextmanager
def installed():
    """Hold and share NVFP4 weights as a GPU does, inside."""
    vllm_cpu_shim.install()
    import vllm._custom_ops as ops
    import vllm.model_executor.kernels.linear as kernels

    lend_no_more = override("nvfp4", vllm_lends=("cpu", "cuda"))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ops, "gptq_marlin_repack", repack)
            patch.setattr(kernels.MarlinNvFp4LinearKernel, "process_weights_after_loading", prepare)
            patch.setattr(kernels.MarlinNvFp4LinearKernel, "apply_weights", _apply)
            yield
    finally:
        lend_no_more()


def prepare(kernel: object, layer: nn.Module) -> None:
    """vLLM's own preparation, but for the bias: 0.32 cannot load one again that was permuted for the kernel."""
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import prepare_fp4_layer_for_marlin

    bias, layer.bias = layer.bias, None
    prepare_fp4_layer_for_marlin(layer)
    layer.bias = bias


def repack(b_q_weight: Tensor, size_k: int, size_n: int, num_bits: int = 4, **options: object) -> Tensor:
    """What `gptq_marlin_repack` does on a GPU, by vLLM's own reference in Python."""
    from vllm.model_executor.layers.quantization.utils.marlin_utils_test import get_weight_perm, marlin_weights

    shifts = 4 * torch.arange(8, dtype=torch.int32)
    codes = ((b_q_weight[:, None, :] >> shifts[None, :, None]) & 0xF).reshape(size_k, size_n)
    return marlin_weights(codes, size_k, size_n, num_bits, get_weight_perm(num_bits))


def _apply(kernel: object, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
    values = fp4_values(unpack_nibbles(marlin_codes(layer.weight)))
    scales = marlin_scales(layer.weight_scale.view(torch.uint8)) * (layer.weight_global_scale / GLOBAL)
    weight = values.unflatten(-1, (-1, 16)).mul(scales.unsqueeze(-1)).flatten(-2)
    return nn.functional.linear(x, weight.to(x.dtype), bias)
