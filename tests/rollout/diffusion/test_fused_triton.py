import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from lit_qrl.functional.diffusion import confidence, gumbel_argmax
from tests.triton_interpreter import run_interpreted


def compare_norms(device):
    from lit_qrl.rollout.diffusion import fused_triton

    for size in (96, 128, 4096):
        x, residual = torch.randn(2, 3, 5, size, generator=torch.Generator().manual_seed(0)).bfloat16()
        plain = LlamaRMSNorm(size, 1e-5).bfloat16()
        with torch.no_grad():
            plain.weight.copy_(torch.linspace(0.5, 1.5, size))
            weight, total = plain.weight.to(device), residual.clone().to(device)
            for given, found in (
                (x, fused_triton.norm(x.to(device), None, weight, 1e-5)),
                (x + residual, fused_triton.norm(x.to(device), total, weight, 1e-5)),
            ):
                expected = plain(given)
                torch.testing.assert_close(found.cpu(), expected, rtol=2**-7, atol=0)
                assert (found.cpu() == expected).float().mean() > 0.99
        assert torch.equal(total.cpu(), x + residual)


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


COMPARISONS = [compare_norms, compare_draws]


@pytest.mark.vllm  # which brings Triton
@pytest.mark.parametrize("compare", COMPARISONS)
def test_kernels_in_the_interpreter(compare):
    run_interpreted(compare)


@pytest.mark.gpu
@pytest.mark.parametrize("compare", COMPARISONS)
def test_kernels_on_the_device(compare):
    compare(torch.device("cuda"))
