import pytest
import torch
from compressed_tensors.compressors.pack_quantized import pack_to_int32

from lit_qrl.errors import ConfigError
from lit_qrl.formats import Int4Group
from tests.formats.oracle import args, compressed, gemm64, same_bits, ulps, weights

CASES = list(weights(torch.float32))


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_codes_and_scales_are_those_of_compressed_tensors(case, dtype, group):
    weight = weights(dtype)[case]
    description = args(4, "int", "group", group_size=group)
    codes, scale, _ = compressed(weight, description, (2,), weight.unflatten(-1, (-1, group)))
    q = Int4Group(group_size=group).quantize(weight)
    assert same_bits(q.scales, scale)
    assert same_bits(q.codes, pack_to_int32(codes.to(torch.int8), 4))


@pytest.mark.parametrize("activations", [None, "fp8", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_against_a_gemm_in_fp64(dtype, activations):
    torch.manual_seed(1)
    format = Int4Group(group_size=32, activations=activations)
    weight, bias = torch.randn(96, 256).to(dtype) * 0.05, torch.randn(96).to(dtype)
    x = (torch.randn(50, 256) * torch.rand(50, 1) * 10).to(dtype)
    q = format.quantize(weight)
    reference = x.double()
    for i in range(50):
        amax = x[i].float().abs().max()
        if activations == "fp8":
            reference[i] = (x[i].float() / (amax / 448)).to(torch.float8_e4m3fn).double() * (amax / 448).double()
        elif activations == "int8":
            reference[i] = torch.round(x[i].float() / (amax / 127)).double() * (amax / 127).double()
    # a weight-only format multiplies in the input's dtype, so its weight is rounded to that
    dequantized = format.dequantize(q, dtype if activations is None else torch.float32).double()
    exact = gemm64(reference, dequantized, bias)
    out = format.linear(x, q, bias)
    assert out.dtype == dtype
    assert ulps(out, exact, reference.abs() @ dequantized.abs().t()).max() <= 1.0


def test_dequantized_is_codes_times_scales():
    weight = torch.randn(4, 64)
    q = Int4Group(group_size=32).quantize(weight)
    dequantized = Int4Group(group_size=32).dequantize(q)
    for row in range(4):
        for column in range(64):
            word = int(q.codes[row, column // 8]) & 0xFFFFFFFF
            code = (word >> (4 * (column % 8)) & 15) - 8
            assert dequantized[row, column].item() == pytest.approx(code * q.scales[row, column // 32].item())


def test_a_shape_that_does_not_fit_names_layer_shape_and_remedy():
    with pytest.raises(ValueError, match=r"mlp\.up_proj.*divisible by 128.*\(32, 96\).*smaller group_size"):
        Int4Group().check("mlp.up_proj", (32, 96))
    with pytest.raises(ValueError, match="divisible by 128"):
        Int4Group().quantize(torch.ones(32, 96))


def test_options_are_checked_at_construction():
    with pytest.raises(ConfigError, match=r"multiple of 8.*Given: 12"):
        Int4Group(group_size=12)
    with pytest.raises(ConfigError, match=r"null, fp8 or int8.*'fp4'"):
        Int4Group(activations="fp4")


def test_matrices_of_one_shape_share_the_tensor_that_describes_them():
    format = Int4Group(group_size=8)
    first, second = (dict(format.export(format.quantize(torch.randn(4, 16)), "a"))["a.weight_shape"] for _ in range(2))
    assert first is second
    assert first.tolist() == [4, 16]
    assert not first.is_inference()
