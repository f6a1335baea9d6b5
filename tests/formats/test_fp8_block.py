import pytest
import torch
from compressed_tensors.quantization.utils import maybe_pad_tensor_for_block_quant

from lit_qrl.formats import FP8Block
from tests.formats.oracle import args, compressed, gemm64, same_bits, ulps, weights

CASES = list(weights(torch.float32))


def blocks(weight):
    padded = maybe_pad_tensor_for_block_quant(weight, (128, 128))
    return padded.reshape(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)


@pytest.mark.parametrize("shape", [(256, 384), (200, 72)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_codes_and_scales_are_those_of_compressed_tensors(case, dtype, shape):
    weight = weights(dtype, shape)[case]
    description = args(8, "float", "block", block_structure=[128, 128])
    codes, scale, _ = compressed(weight, description, (1, 3), blocks(weight))
    q = FP8Block().quantize(weight)
    assert same_bits(q.scales, scale)
    assert same_bits(q.codes, codes.to(torch.float8_e4m3fn))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(256, 384), (200, 72)])
@pytest.mark.parametrize("rows", [1, 65])
def test_linear_against_a_gemm_in_fp64(rows, shape, dtype):
    torch.manual_seed(1)
    weight, bias = torch.randn(shape) * 0.05, torch.randn(shape[0])
    x = (torch.randn(rows, shape[1]) * torch.rand(rows, shape[1]) * 10).to(dtype)
    q = FP8Block().quantize(weight)
    reference = torch.empty(rows, shape[1], dtype=torch.float64)
    for i in range(rows):
        for start in range(0, shape[1], 128):
            part = x[i, start : start + 128].float()
            scale = part.abs().max() / 448.0
            reference[i, start : start + 128] = (part / scale).to(torch.float8_e4m3fn).double() * scale.double()
    dequantized = torch.empty(shape, dtype=torch.float64)
    for i in range(shape[0]):
        for j in range(shape[1]):
            dequantized[i, j] = q.codes[i, j].double() * q.scales[i // 128, j // 128].double()
    exact = gemm64(reference, dequantized, bias)
    out = FP8Block().linear(x, q, bias)
    assert out.dtype == dtype
    assert ulps(out, exact, reference.abs() @ dequantized.abs().t()).max() <= 1.0
