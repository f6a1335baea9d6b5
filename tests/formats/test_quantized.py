"""Every format that quantizes, against the library that defines it and a GEMM in fp64; NF4 has a file of its own."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.mx_utils import compress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from compressed_tensors.compressors.pack_quantized import pack_to_int32
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import maybe_pad_tensor_for_block_quant

from lit_qrl import formats
from lit_qrl.errors import ConfigError
from lit_qrl.formats import MXFP4, NF4, NVFP4, FP8Block, FP8Row, FP8Tensor, Int3Channel, Int4Group, Int8Channel
from lit_qrl.formats.support import row_of
from lit_qrl.quantize import quantize_checkpoint, writable
from lit_qrl.rollout.vllm.checks import check_format
from tests.formats.oracle import args, compressed, gemm64, rounded, same_bits, ulps, weights

CASES = list(weights(torch.float32))


def blocks(weight):
    padded = maybe_pad_tensor_for_block_quant(weight, (128, 128))
    return padded.reshape(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)


def groups(size):
    return lambda weight: weight.unflatten(-1, (-1, size))


def e4m3(codes):
    return codes.to(torch.float8_e4m3fn)


def int4(size):
    packed = lambda codes: pack_to_int32(codes.to(torch.int8), 4)  # noqa: E731
    return Defined(Int4Group(size), args(4, "int", "group", group_size=size), (2,), groups(size), packed)


@dataclass
class Defined:
    """What compressed-tensors says of a format: scales reduce `dims` of the weight as `cut`; how it stores both."""

    format: formats.NumberFormat
    description: Any
    dims: tuple[int, ...]
    cut: Any = torch.Tensor.contiguous
    codes: Any = e4m3
    scales: Any = torch.Tensor.contiguous


DEFINED = {
    "fp8_tensor": Defined(FP8Tensor(), args(8, "float", "tensor"), (0, 1)),
    "fp8_row": Defined(FP8Row(), args(8, "float", "channel"), (1,)),
    "fp8_block": Defined(FP8Block(), args(8, "float", "block", block_structure=[128, 128]), (1, 3), blocks),
    "int8_channel": Defined(Int8Channel(), args(8, "int", "channel"), (1,), codes=lambda codes: codes.to(torch.int8)),
    **{f"int4_group {size}": int4(size) for size in (32, 64, 128)},
    "nvfp4": Defined(
        NVFP4(),
        args(4, "float", "tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn),
        (2,),
        groups(16),
        pack_fp4_to_uint8,
        e4m3,
    ),
    "mxfp4": Defined(
        MXFP4(),
        args(4, "float", "group", group_size=32, scale_dtype=torch.uint8),
        (2,),
        groups(32),
        pack_fp4_to_uint8,
        lambda scales: compress_mx_scale(scales, torch.uint8),
    ),
    "int3_channel": Defined(Int3Channel(), args(3, "int", "channel"), (1,), codes=None),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", [*DEFINED, "fp8_block in part"])
def test_codes_and_scales_are_those_of_compressed_tensors(name, case, dtype):
    name, _, part = name.partition(" in ")
    one, weight = DEFINED[name], weights(dtype, (200, 72) if part else (256, 384))[case]
    with torch.compiler.set_stance("force_eager"):
        codes, scale, global_scale = compressed(weight, one.description, one.dims, one.cut(weight))
        numbers = dequantize(codes, scale.float(), args=one.description, global_scale=global_scale, dtype=torch.float32)
    q = one.format.quantize(weight)
    assert same_bits(q.scales, one.scales(scale))
    assert (q.global_scale is None and global_scale is None) or same_bits(q.global_scale, global_scale)
    assert one.codes is None or same_bits(q.codes, one.codes(codes))  # None: the library packs in another way
    torch.testing.assert_close(one.format.dequantize(q), numbers, rtol=1e-6, atol=0)


LINEAR = {
    "fp8_tensor": (FP8Tensor(), "tensor"),
    "fp8_tensor by token": (FP8Tensor("token"), "token"),
    "fp8_row": (FP8Row(), "token"),
    "fp8_block": (FP8Block(), "group"),
    "int8_channel": (Int8Channel(), "int8"),
    "int4_group": (Int4Group(32), None),
    "int4_group fp8": (Int4Group(32, "fp8"), "token"),
    "int4_group int8": (Int4Group(32, "int8"), "int8"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "shape"), [(1, (96, 256)), (130, (96, 256)), (3, (256, 384)), (65, (200, 72))])
@pytest.mark.parametrize("name", LINEAR)
def test_linear_against_a_gemm_in_fp64(name, rows, shape, dtype):
    format, kind = LINEAR[name]
    if shape[1] % 32 and format.name == "int4_group":
        shape = (200, 96)
    torch.manual_seed(1)
    weight, bias = torch.randn(shape) * 0.05, torch.randn(shape[0])
    if format.name == "int4_group":
        weight, bias = weight.to(dtype), bias.to(dtype)
    x = (torch.randn(rows, shape[1]) * torch.rand(rows, shape[1] if kind == "group" else 1) * 10).to(dtype)
    q = format.quantize(weight)
    if format.name == "int4_group":  # a weight-only format multiplies in the input's dtype, and so rounds its weight
        exact_weight = format.dequantize(q, dtype if kind is None else torch.float32).double()
    else:
        scales = q.scales.double()
        if kind == "group":
            scales = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
        exact_weight = q.codes.double() * scales
    reference = rounded(x, kind)
    out = format.linear(x, q, bias)
    assert out.dtype == dtype
    assert ulps(out, gemm64(reference, exact_weight, bias), reference.abs() @ exact_weight.abs().t()).max() <= 1.0


def test_linear_keeps_leading_dimensions_and_a_zero_input():
    q = FP8Tensor().quantize(torch.randn(32, 64))
    out = FP8Tensor().linear(torch.zeros(2, 3, 64), q)
    assert out.shape == (2, 3, 32)
    assert not out.any()


def test_the_last_byte_of_a_power_of_two_is_nan():
    q = MXFP4().quantize(torch.randn(2, 64))
    q.scales[1, 1] = 255  # OCP Microscaling 1.0, 5.4.1
    assert MXFP4().dequantize(q).isnan().tolist() == [[False] * 64, [False] * 32 + [True] * 32]


@pytest.mark.parametrize("amax,exponent", [(1.0, -2), (1.74, -2), (1.75, -1), (6.0, 0), (7.0, 1), (2.0**-100, -102)])
def test_the_scale_of_mxfp4_rounds_up_from_seven_quarters_of_a_power(amax, exponent):
    weight = torch.zeros(1, 32)
    weight[0, 7] = amax
    assert MXFP4().quantize(weight).scales.item() - 127 == exponent


def test_eight_codes_of_int3_are_three_bytes_the_first_one_lowest():
    weight = torch.tensor([[3.0, -3.5, 0.0, 1.0, -1.0, 2.0, -2.0, 3.5]])
    q = Int3Channel().quantize(weight)
    expected = [3, -4, 0, 1, -1, 2, -2, 3]
    word = sum((code + 4) << (3 * place) for place, code in enumerate(expected))
    assert q.codes.tolist() == [list(word.to_bytes(3, "little"))]
    assert Int3Channel().dequantize(q).tolist() == [[float(code) for code in expected]]


def test_a_shared_amax_sets_the_scale():
    q = FP8Tensor().quantize(torch.tensor([[1.0, -2.0]]), shared_amax=torch.tensor(896.0))
    assert (q.scales.tolist(), q.codes.float().tolist()) == ([2.0], [[0.5, -1.0]])
    loaded = FP8Tensor().load({"weight": q.codes, "weight_scale": torch.tensor(2.0)}, (1, 2))  # as some folders have it
    assert loaded.scales.shape == q.scales.shape
    weight = torch.randn(4, 32)
    q = NVFP4().quantize(weight, shared_amax=torch.tensor(26.88))
    assert q.global_scale.item() == pytest.approx(100.0)
    assert (NVFP4().dequantize(q) - weight).abs().max() < 0.6
    alone = FP8Row().quantize(weight, shared_amax=torch.tensor(26.88))  # whose rows share nothing
    assert torch.equal(alone.scales, FP8Row().quantize(weight).scales)


@pytest.mark.parametrize(
    ("format", "shape", "words"),
    [
        (Int4Group(), (32, 96), r"mlp\.up_proj.*divisible by 128.*\(32, 96\).*smaller group_size"),
        (NVFP4(), (32, 40), r"mlp\.up_proj.*nvfp4.*divisible by 16.*\(32, 40\).*Exclude"),
        (MXFP4(), (32, 40), r"mlp\.up_proj.*mxfp4.*divisible by 32.*\(32, 40\).*Exclude"),
        (NF4(), (3, 40), r"mlp\.up_proj.*nf4.*multiple of 64.*\(3, 40\).*Exclude"),
        (Int3Channel(), (8, 12), r"mlp\.up_proj does not fit int3_channel.*divisible by 8.*Exclude"),
    ],
    ids=lambda one: getattr(one, "name", ""),
)
def test_a_shape_that_does_not_fit_names_layer_shape_and_remedy(format, shape, words):
    with pytest.raises(ConfigError, match=words):
        format.check("mlp.up_proj", shape)
    with pytest.raises(ConfigError, match="This weight does not fit"):
        format.quantize(torch.ones(shape))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FP8Tensor(activations="row"), r"tensor or token.*'row'"),
        (lambda: Int4Group(group_size=12), r"multiple of 8.*Given: 12"),
        (lambda: Int4Group(activations="fp4"), r"null, fp8 or int8.*'fp4'"),
    ],
)
def test_options_are_checked_at_construction(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_matrices_of_one_shape_share_the_tensor_that_describes_them():
    format = Int4Group(group_size=8)
    first, second = (dict(format.export(format.quantize(torch.randn(4, 16)), "a"))["a.weight_shape"] for _ in range(2))
    assert first is second
    assert first.tolist() == [4, 16]
    assert not first.is_inference()


def test_int3_which_nobody_computes_or_reads_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no kernel for publisher\.format int3_channel.*TransformersEngine"):
        check_format(Int3Channel())
    with pytest.raises(ConfigError, match=r"No library reads a folder in int3_channel.*nvfp4.*--format bf16"):
        quantize_checkpoint(tmp_path, tmp_path / "out", formats.get("int3_channel"))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError) as refused:
        writable("bf16")
    assert "int3_channel" not in refused.value.expected
    assert not row_of(Int3Channel()).audited
