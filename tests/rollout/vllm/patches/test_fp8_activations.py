import pytest
import torch

from lit_qrl.rollout.vllm.patches.fp8_activations import PATCH


@pytest.mark.parametrize("by_token", [False, True])
def test_activations_are_quantized_as_a_loop_does(by_token, fake):
    ops = fake("vllm._custom_ops", scaled_fp8_quant=lambda *args: None)
    PATCH.apply((0, 32, 0))
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 5)[:, None]
    codes, scale = ops.scaled_fp8_quant(x, use_per_token_if_dynamic=by_token)
    for row in range(5):
        amax = max(abs(float(v)) for v in (x[row] if by_token else x.flatten()))
        own = float(scale.flatten()[row if by_token else 0])
        assert own == pytest.approx(amax / 448, rel=1e-6)
        expected = (x[row] / scale.flatten()[row if by_token else 0]).to(torch.float8_e4m3fn)
        assert torch.equal(codes[row].view(torch.uint8), expected.view(torch.uint8))
    fixed, same = ops.scaled_fp8_quant(x, scale=torch.tensor([0.5]))
    assert float(same) == 0.5
    assert torch.equal(fixed.float(), (x / 0.5).clamp(-448, 448).to(torch.float8_e4m3fn).float())
