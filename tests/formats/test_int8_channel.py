import pytest
import torch

from lit_qrl.formats import Int8Channel
from tests.formats.oracle import args, compressed, gemm64, same_bits, ulps, weights

CASES = list(weights(torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_codes_and_scales_are_those_of_compressed_tensors(case, dtype):
    weight = weights(dtype)[case]
    codes, scale, _ = compressed(weight, args(8, "int", "channel"), (1,), weight)
    q = Int8Channel().quantize(weight)
    assert same_bits(q.scales, scale)
    assert same_bits(q.codes, codes.to(torch.int8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_against_a_gemm_in_fp64(dtype):
    torch.manual_seed(1)
    weight, bias = torch.randn(96, 256) * 0.05, torch.randn(96)
    x = (torch.randn(50, 256) * torch.rand(50, 1) * 10).to(dtype)
    q = Int8Channel().quantize(weight)
    reference = torch.empty(50, 256, dtype=torch.float64)
    for i in range(50):
        scale = x[i].float().abs().max() / 127.0
        reference[i] = torch.round(x[i].float() / scale).double() * scale.double()
    dequantized = q.codes.double() * q.scales.double()
    out = Int8Channel().linear(x, q, bias)
    assert out.dtype == dtype
    exact = gemm64(reference, dequantized, bias)
    assert ulps(out, exact, reference.abs() @ dequantized.abs().t()).max() <= 1.0
