import pytest
import torch

from lit_qrl.errors import ConfigError
from lit_qrl.formats import FP8Tensor
from tests.formats.oracle import args, compressed, gemm64, same_bits, ulps, weights

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CASES = list(weights(torch.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_codes_and_scale_are_those_of_compressed_tensors(case, dtype):
    weight = weights(dtype)[case]
    codes, scale, _ = compressed(weight, args(8, "float", "tensor"), (0, 1), weight)
    q = FP8Tensor().quantize(weight)
    assert same_bits(q.scales, scale)
    assert same_bits(q.codes, codes.to(torch.float8_e4m3fn))


def test_a_shared_amax_sets_the_scale():
    weight = torch.tensor([[1.0, -2.0]])
    q = FP8Tensor().quantize(weight, shared_amax=torch.tensor(896.0))
    assert q.scales.tolist() == [2.0]
    assert q.codes.float().tolist() == [[0.5, -1.0]]


@pytest.mark.parametrize("activations", ["tensor", "token"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 200])
def test_linear_against_a_gemm_in_fp64(rows, dtype, activations):
    torch.manual_seed(1)
    format = FP8Tensor(activations=activations)
    weight, bias = torch.randn(96, 256) * 0.05, torch.randn(96)
    x = (torch.randn(rows, 256) * torch.rand(rows, 1) * 10).to(dtype)
    q = format.quantize(weight)
    reference = torch.empty(rows, 256, dtype=torch.float64)
    amaxes = x.float().abs().amax(dim=1) if activations == "token" else x.float().abs().amax().expand(rows)
    for i in range(rows):
        scale = amaxes[i] / 448.0
        reference[i] = (x[i].float() / scale).to(torch.float8_e4m3fn).double() * scale.double()
    exact = gemm64(reference, q.codes.double() * q.scales.double(), bias)
    absolute = reference.abs() @ (q.codes.double().abs() * q.scales.double()).t()
    out = format.linear(x, q, bias)
    assert out.dtype == dtype
    assert ulps(out, exact, absolute).max() <= 1.0


def test_linear_keeps_leading_dimensions_and_a_zero_input():
    q = FP8Tensor().quantize(torch.randn(32, 64))
    out = FP8Tensor().linear(torch.zeros(2, 3, 64), q)
    assert out.shape == (2, 3, 32)
    assert not out.any()


def test_one_tensor_scale_is_shared_by_all_rows():
    torch.manual_seed(0)
    q = FP8Tensor().quantize(torch.randn(32, 64))
    x = torch.randn(4, 64)
    loud = torch.cat([x, torch.full((1, 64), 1e4)])
    assert not torch.equal(FP8Tensor().linear(x, q), FP8Tensor().linear(loud, q)[:4])
    assert torch.equal(FP8Tensor("token").linear(x, q), FP8Tensor("token").linear(loud, q)[:4])


def test_options_are_checked_at_construction():
    with pytest.raises(ConfigError, match=r"tensor or token.*'row'"):
        FP8Tensor(activations="row")
