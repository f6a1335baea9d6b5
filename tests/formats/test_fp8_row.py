import pytest
import torch

from lit_qrl.formats import FP8Row
from tests.formats.oracle import args, compressed, gemm64, same_bits, ulps, weights

CASES = list(weights(torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_codes_and_scales_are_those_of_compressed_tensors(case, dtype):
    weight = weights(dtype)[case]
    codes, scale, _ = compressed(weight, args(8, "float", "channel"), (1,), weight)
    q = FP8Row().quantize(weight)
    assert same_bits(q.scales, scale)
    assert same_bits(q.codes, codes.to(torch.float8_e4m3fn))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 130])
def test_linear_against_a_gemm_in_fp64(rows, dtype):
    torch.manual_seed(1)
    weight, bias = torch.randn(96, 256) * 0.05, torch.randn(96)
    x = (torch.randn(rows, 256) * torch.rand(rows, 1) * 10).to(dtype)
    q = FP8Row().quantize(weight)
    reference = torch.empty(rows, 256, dtype=torch.float64)
    for i in range(rows):
        scale = x[i].float().abs().max() / 448.0
        reference[i] = (x[i].float() / scale).to(torch.float8_e4m3fn).double() * scale.double()
    dequantized = q.codes.double() * q.scales.double()
    exact = gemm64(reference, dequantized, bias)
    out = FP8Row().linear(x, q, bias)
    assert out.dtype == dtype
    assert ulps(out, exact, reference.abs() @ dequantized.abs().t()).max() <= 1.0


def test_a_row_does_not_depend_on_the_others():
    torch.manual_seed(0)
    q = FP8Row().quantize(torch.randn(32, 64))
    x = torch.randn(4, 64)
    assert torch.allclose(FP8Row().linear(x[:1], q), FP8Row().linear(x, q)[:1], atol=1e-6)
