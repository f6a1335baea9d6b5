"""Decoder layers that learner and sampler compute alike."""

import pytest
import torch
from torch.nn import functional as F

from lit_qrl.errors import ConfigError
from lit_qrl.rollout.vllm import same_kernels
from lit_qrl.rollout.vllm.engine import VLLMEngine
from tests.triton_interpreter import run_interpreted


@pytest.fixture(autouse=True)
def inactive(monkeypatch):
    monkeypatch.setattr(same_kernels, "_active", False)


@pytest.mark.vllm
def test_an_engine_is_built_with_the_learners_norm_and_the_next_one_with_vllms():
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.layernorm import RMSNorm

    with set_current_vllm_config(VllmConfig()):
        with same_kernels.built(True):
            mine = RMSNorm(8)
            assert same_kernels.active()
        theirs = RMSNorm(8)
        assert same_kernels.active()  # while that engine lives
        with same_kernels.built(False):
            assert not same_kernels.active()
    assert isinstance(mine, RMSNorm)
    assert type(mine) is not RMSNorm
    assert type(mine).forward_cuda is not RMSNorm.forward_cuda
    assert type(theirs) is RMSNorm


class Plain(torch.nn.Module):
    """As vLLM's class, as far as it is asked."""

    variance_size_override, has_weight, variance_epsilon = None, True, 1e-6

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 128))


def compare_norms(device):
    torch.manual_seed(0)
    norm = same_kernels._norm_of(Plain)()
    x, residual = torch.randn(5, 2, 128, device=device), torch.randn(5, 2, 128, device=device)
    torch.testing.assert_close(norm.forward_cuda(x), F.rms_norm(x, (128,), norm.weight, 1e-6))
    y, total = norm.forward_cuda(x, residual)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(y, F.rms_norm(x + residual, (128,), norm.weight, 1e-6))
    assert norm.forward_cuda(x[3:4], residual[3:4])[0].equal(y[3:4])  # whatever is beside it


def test_the_norm_is_the_formula_and_a_row_does_not_depend_on_others():
    run_interpreted(compare_norms)


@pytest.mark.parametrize(
    ("available", "options", "expected"),
    [
        (False, {}, "compute capability 9.0"),
        (True, {"engine_args": {"attention_backend": "FLASHINFER"}}, "FLASH_ATTN"),
    ],
)
def test_what_computes_otherwise_is_refused(monkeypatch, available, options, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    engine = VLLMEngine(same_kernels=True, **options)
    assert engine.quick_start is True
    with pytest.raises(ConfigError, match=expected):
        same_kernels.check(engine._arguments)


@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.parametrize("size", [64, 128])
def test_attention_has_the_values_and_gradients_of_torchs(size):
    from lit_qrl.precision.vllm_kernels.exact import flash_attention

    torch.manual_seed(0)
    shape = (3, 70, 8, size), (3, 70, 2, size), (3, 70, 2, size)
    given = [torch.randn(one, device="cuda", dtype=torch.bfloat16, requires_grad=True) for one in shape]
    wide = [one.detach().double().requires_grad_() for one in given]
    out = flash_attention(*given)
    heads = [one.transpose(1, 2) for one in wide]
    expected = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)
    upstream = torch.randn_like(out)
    found = torch.autograd.grad(out, given, upstream)
    wanted = torch.autograd.grad(expected, wide, upstream.double())
    for one, other in zip(found, wanted, strict=True):
        assert F.cosine_similarity(one.double().flatten(), other.flatten(), dim=0) > 0.9999
        assert one.double().norm() / other.norm() == pytest.approx(1, abs=1e-2)
