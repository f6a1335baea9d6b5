import pytest
import torch

from lit_qrl.formats.kernels import activations


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scales_per_tensor_and_per_token(dtype):
    x = torch.tensor([[1.0, -3.0], [0.5, 0.25], [0.0, 0.0]]).to(dtype)
    assert activations.dynamic_scale(x, None, 3.0).item() == 1.0
    scale = activations.dynamic_scale(x, -1, 2.0)
    assert scale.dtype == torch.float32
    assert scale[:2].flatten().tolist() == [1.5, 0.25]
    assert 0 < scale[2].item() < 1e-37
    assert not activations.e4m3_rounded(x[2:], scale[2:]).any()


def test_codes_and_rounded_values_are_the_same_numbers():
    torch.manual_seed(0)
    x = torch.randn(200, 256) * 10 ** (torch.rand(200, 256) * 8 - 6)
    scale = activations.dynamic_scale(x, -1, 448.0)
    assert torch.equal(activations.e4m3_codes(x, scale).float(), activations.e4m3_rounded(x, scale))


def test_groups_are_scaled_alone_and_a_rest_is_padded():
    x = torch.cat([torch.ones(2, 128), torch.full((2, 40), 100.0)], dim=1)
    codes, scale = activations.e4m3_group_codes(x, 128)
    assert codes.shape == (2, 168)
    assert scale.tolist() == [pytest.approx([1 / 448, 100 / 448])] * 2
    assert codes.float().unique().tolist() == [448.0]
    assert torch.allclose(activations.e4m3_group_dequantized(x, 128), x)


def test_nan_and_infinity_stay_visible():
    x = torch.tensor([[1.0, float("nan")], [float("inf"), 1.0]])
    for dim in (-1, None):
        scale = activations.dynamic_scale(x, dim, 448.0)
        assert torch.isnan(activations.e4m3_rounded(x, scale)).any(dim=1).all()


def test_int8_reaches_both_ends():
    x = torch.tensor([[-2.0, 2.0, 0.5]])
    codes, scale = activations.int8_rounded(x)
    assert codes.tolist() == [[-127.0, 127.0, 32.0]]
    assert scale.item() == pytest.approx(2 / 127)
