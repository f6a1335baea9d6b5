import pytest
import torch

from lit_qrl.functional.diffusion import confidence, gumbel_argmax
from tests.triton_interpreter import run_interpreted


def compare_draws(device):
    from lit_qrl.rollout.diffusion import fused_triton

    for v, dtype in ((20, torch.float32), (9000, torch.bfloat16)):
        generator = torch.Generator().manual_seed(v)
        logits = (3 * torch.randn(2, 4, v, generator=generator)).to(dtype)
        logits[0, 1] = logits[0, 0]
        logits[1, 2, 4:] = 2.0  # ties
        uniform = torch.rand(2, 4, v, generator=generator, dtype=torch.float64)
        uniform[0, 0, 7] = 0.0
        masked = torch.tensor([[True, True, False, True], [False, True, True, True]])
        masked_out = logits.float()
        masked_out[..., 3] = float("-inf")
        for temperature, noise in ((0.0, None), (0.9, uniform)):
            given = None if noise is None else noise.to(device)
            scale = torch.tensor(temperature, dtype=torch.float64, device=device)
            tokens, sure = fused_triton.draw(logits.to(device), given, masked.to(device), scale, 3)
            expected = gumbel_argmax(masked_out, noise, temperature)
            assert torch.equal(tokens.cpu()[masked], expected[masked])
            torch.testing.assert_close(sure.cpu()[masked], confidence(masked_out, expected)[masked])


COMPARISONS = [compare_draws]


@pytest.mark.vllm  # which brings Triton
@pytest.mark.parametrize("compare", COMPARISONS)
def test_kernels_in_the_interpreter(compare):
    run_interpreted(compare)


@pytest.mark.gpu
@pytest.mark.parametrize("compare", COMPARISONS)
def test_kernels_on_the_device(compare):
    compare(torch.device("cuda"))
