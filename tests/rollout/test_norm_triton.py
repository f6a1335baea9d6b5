import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.triton_interpreter import run_interpreted


def compare_norms(device):
    from lit_qrl.rollout import norm_triton

    for size in (96, 128, 4096):
        x, residual = torch.randn(2, 3, 5, size, generator=torch.Generator().manual_seed(0)).bfloat16()
        plain = LlamaRMSNorm(size, 1e-5).bfloat16()
        with torch.no_grad():
            plain.weight.copy_(torch.linspace(0.5, 1.5, size))
            weight, total = plain.weight.to(device), residual.clone().to(device)
            for given, found in (
                (x, norm_triton.norm(x.to(device), None, weight, 1e-5)),
                (x + residual, norm_triton.norm(x.to(device), total, weight, 1e-5)),
            ):
                expected = plain(given)
                torch.testing.assert_close(found.cpu(), expected, rtol=2**-7, atol=0)
                assert (found.cpu() == expected).float().mean() > 0.99
        assert torch.equal(total.cpu(), x + residual)


@pytest.mark.vllm  # which brings Triton
def test_the_kernel_in_the_interpreter():
    run_interpreted(compare_norms)


@pytest.mark.gpu
def test_the_kernel_on_the_device():
    compare_norms(torch.device("cuda"))
