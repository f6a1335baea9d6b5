"""What the adapters hand to vLLM's ops: stand-ins on a CPU undo the documented layouts and multiply."""

import sys
from types import ModuleType

import pytest
import torch

from lit_qrl.formats import NVFP4, FP8Row, Int4Group
from lit_qrl.formats.numerics import unpack_int4
from lit_qrl.precision.vllm_kernels import kernels as sampler_kernels
from lit_qrl.precision.vllm_kernels.kernels import CutlassFP8Row, CutlassW4A8, Machete, MarlinFP4, MarlinInt4

HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(sampler_kernels, "_capability", lambda: (9, 0))


@pytest.mark.parametrize(
    ("kernel", "format", "shape", "dtype", "reason"),
    [
        (Machete, Int4Group(), (256, 128), HALF, None),
        (Machete, Int4Group(32), (256, 128), HALF, "groups"),
        (Machete, Int4Group(), (64, 128), HALF, "out_features of 128"),
        (Machete, Int4Group(), (256, 128), torch.float32, "bf16 and fp16"),
        (Machete, NVFP4(), (256, 128), HALF, "int4_group"),
        (Machete, Int4Group(activations="fp8"), (256, 128), HALF, "activations left alone"),
        (MarlinInt4, Int4Group(32), (48, 128), HALF, None),
        (MarlinInt4, Int4Group(8), (48, 128), HALF, "groups"),
        (MarlinFP4, NVFP4(), (48, 64), HALF, None),
        (MarlinFP4, FP8Row(), (48, 64), HALF, "nvfp4 and mxfp4"),
        (CutlassW4A8, Int4Group(activations="fp8"), (128, 256), HALF, None),
        (CutlassW4A8, Int4Group(64, activations="fp8"), (128, 256), HALF, "groups"),
        (CutlassW4A8, Int4Group(), (128, 256), HALF, "under FP8 activations"),
        (CutlassW4A8, Int4Group(activations="int8"), (128, 256), HALF, "under FP8 activations"),
        (CutlassW4A8, Int4Group(activations="fp8"), (128, 256), torch.float16, "bf16"),
    ],
)
def test_a_kernel_says_what_it_cannot_multiply(kernel, format, shape, dtype, reason):
    said = kernel().missing(format, shape, dtype)
    assert said is None if reason is None else reason in said


def test_older_devices_have_no_machete(monkeypatch):
    monkeypatch.setattr(sampler_kernels, "_capability", lambda: (8, 9))
    assert "9.0" in Machete().missing(Int4Group(), (256, 128), HALF)


@pytest.mark.vllm
def test_machete_gets_columns_of_words_and_scales_by_group(monkeypatch):
    from vllm import _custom_ops as ops
    from vllm.scalar_type import scalar_types

    seen = {}

    def prepack(codes, a_type, b_type, group_scales_type):
        seen.update(a_type=a_type, b_type=b_type, scales_type=group_scales_type, stride=codes.stride())
        return codes

    def multiply(a, b_q, b_type, b_group_scales, b_group_zeros, b_group_size):
        weight = unpack_int4(b_q.t()).float()  # words run along k: "k/8 n"
        scales = b_group_scales.float().repeat_interleave(b_group_size, dim=0)  # "k/g n"
        return (a.float() @ (weight.t() * scales)).to(a.dtype)

    monkeypatch.setattr(ops, "machete_prepack_B", prepack)
    monkeypatch.setattr(ops, "machete_mm", multiply)
    torch.manual_seed(0)
    format = Int4Group(64)
    q, bias = format.quantize(torch.randn(128, 256)), torch.randn(128).bfloat16()
    x = torch.randn(2, 5, 256).bfloat16()
    kernel = Machete()
    out = kernel.apply(x, kernel.prepare(q, HALF), bias)
    assert seen == {"a_type": HALF, "b_type": scalar_types.uint4b8, "scales_type": HALF, "stride": (1, 32)}
    expected = x.float() @ format.dequantize(q).t() + bias.float()
    assert (out.float() - expected).norm() / expected.norm() < 2.0**-7


@pytest.mark.vllm
def test_marlin_gets_what_this_version_takes(monkeypatch):
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils import marlin_utils as utils

    calls = {}

    def repack(b_q_weight, perm, size_k, size_n, num_bits, is_a_8bit=False):  # as 0.26 has it
        calls["repack"] = (tuple(b_q_weight.shape), perm.numel(), size_k, size_n, num_bits)
        return b_q_weight

    def apply(input, weight, weight_scale, weight_zp, g_idx, g_idx_sort_indices, workspace, wtype,
              output_size_per_partition, input_size_per_partition, is_k_full, bias=None):  # fmt: skip
        calls["apply"] = (g_idx.numel(), is_k_full, workspace, tuple(weight_scale.shape))
        return input.new_zeros(input.shape[0], output_size_per_partition)

    monkeypatch.setattr(ops, "gptq_marlin_repack", repack)
    monkeypatch.setattr(utils, "apply_gptq_marlin_linear", apply)
    monkeypatch.setattr(sampler_kernels, "_workspace", lambda device: "locks")
    format = Int4Group(32)
    kernel = MarlinInt4()
    weight = kernel.prepare(format.quantize(torch.randn(128, 256)), HALF)
    assert kernel.apply(torch.randn(3, 256).bfloat16(), weight, None).shape == (3, 128)
    assert calls == {"repack": ((32, 128), 0, 256, 128, 4), "apply": (0, True, "locks", (8, 128))}


def test_rows_of_fp8_are_quantized_once_for_all_layers_that_read_them(monkeypatch):
    made = []

    def scaled_fp8_quant(x, scale, use_per_token_if_dynamic):
        assert use_per_token_if_dynamic
        made.append(x.shape)
        factor = x.abs().amax(dim=1, keepdim=True).float() / 448
        return (x.float() / factor).to(torch.float8_e4m3fn), factor

    def cutlass_scaled_mm(a, b, scale_a, scale_b, out_dtype, bias):
        out = (a.float() * scale_a) @ (b.float() * scale_b.t())
        return (out if bias is None else out + bias.float()).to(out_dtype)

    operators, package = ModuleType("_custom_ops"), ModuleType("vllm")
    operators.scaled_fp8_quant, operators.cutlass_scaled_mm = scaled_fp8_quant, cutlass_scaled_mm
    package._custom_ops = operators
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm._custom_ops", operators)
    torch.manual_seed(0)
    kernel, format, x = CutlassFP8Row(), FP8Row(), torch.randn(2, 3, 64).bfloat16()
    for bias in (None, torch.randn(48).bfloat16()):
        q = format.quantize(torch.randn(48, 64).bfloat16())
        expected = format.apply(x, format.prepare(q, torch.bfloat16), bias)
        torch.testing.assert_close(kernel.apply(x, kernel.prepare(q, torch.bfloat16), bias), expected)
    assert made == [(6, 64)]
    kernel.multiply(x.view(6, 64), kernel.prepare(q, torch.bfloat16), None)
    assert len(made) == 2
