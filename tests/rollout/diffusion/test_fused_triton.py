import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

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


def compare_turns(device):
    from lit_qrl.rollout.diffusion import fused_triton

    for heads, d in ((4, 32), (3, 16)):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(2, 7, heads, d, generator=generator).bfloat16()
        positions = torch.randint(0, 500, (2, 7), generator=generator)
        rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=heads * d, num_attention_heads=heads))
        cos, sin = rotary(x, positions)
        expected = apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=2)[0]
        beside = torch.zeros(2, 7, 2, heads, d, dtype=x.dtype, device=device)
        beside[:, :, 0] = x.to(device)
        for found in (x.clone().to(device), beside[:, :, 0]):
            fused_triton.rotate(found, cos.to(device), sin.to(device))
            assert torch.equal(found.cpu(), expected)
        assert not beside[:, :, 1].any()


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


COMPARISONS = [compare_norms, compare_turns, compare_draws]


@pytest.mark.vllm  # which brings Triton
@pytest.mark.parametrize("compare", COMPARISONS)
def test_kernels_in_the_interpreter(compare):
    run_interpreted(compare)


@pytest.mark.gpu
@pytest.mark.parametrize("compare", COMPARISONS)
def test_kernels_on_the_device(compare):
    compare(torch.device("cuda"))
