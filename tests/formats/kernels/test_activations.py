import pytest
import torch

from lit_qrl.formats.kernels import activations


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scales_per_tensor_and_per_token(dtype):
    x = torch.tensor([[1.0, -3.0], [0.5, 0.25], [0.0, 0.0]]).to(dtype)
    assert activations.dynamic_scale(x, (0, 1), 3.0).item() == 1.0
    scale = activations.dynamic_scale(x, -1, 2.0)
    assert scale.dtype == torch.float32
    assert scale[:2].flatten().tolist() == [1.5, 0.25]
    assert 0 < scale[2].item() < 1e-37
    assert not activations.e4m3_rounded(x, (1, 2))[0][2:].any()


@pytest.mark.parametrize("block", [(1, 256), (200, 256), (1, 128), (1, 100), (128, 128)])
def test_codes_and_rounded_values_are_the_same_numbers(block):
    torch.manual_seed(0)
    x = torch.randn(200, 256) * 10 ** (torch.rand(200, 256) * 8 - 6)
    (codes, scale), (rounded, same) = activations.e4m3_codes(x, block), activations.e4m3_rounded(x, block)
    assert torch.equal(codes.float(), rounded)
    assert torch.equal(scale, same)
    assert scale.shape == (-(-200 // block[0]), -(-256 // block[1]))
    whole = scale.repeat_interleave(block[0], 0)[:200].repeat_interleave(block[1], 1)[:, :256]
    assert torch.equal(activations.e4m3_dequantized(x, block), rounded * whole)


def test_nan_and_infinity_stay_visible():
    x = torch.tensor([[1.0, float("nan")], [float("inf"), 1.0]])
    for block in ((1, 2), (2, 2)):
        assert torch.isnan(activations.e4m3_rounded(x, block)[0]).any(dim=1).all()
