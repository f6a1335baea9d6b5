import sys
from types import SimpleNamespace

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from lit_qrl import rollout
from lit_qrl.rollout.embedded import attention
from lit_qrl.rollout.embedded.attention import StepNorm, take_step_norms
from tests.networks import build_network


@pytest.fixture
def calls(monkeypatch):
    asked = []

    def norm(x, residual, weight, eps):
        asked.append(x.shape)
        assert residual is None
        wide = x.float()
        return weight * (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)

    module = SimpleNamespace(norm=norm, WIDEST=16384)
    monkeypatch.setitem(sys.modules, "lit_qrl.rollout.norm_triton", module)
    monkeypatch.setattr(rollout, "norm_triton", module, raising=False)
    monkeypatch.setattr(attention.dispatch, "available", lambda x, kernel: True)
    return asked


def test_a_step_takes_the_kernel_with_the_plain_norm_s_result(calls):
    plain = Qwen3RMSNorm(96, 1e-5).bfloat16()
    with torch.no_grad():
        plain.weight.copy_(torch.linspace(0.5, 1.5, 96))
        norm = StepNorm(plain)
        assert norm.weight is plain.weight
        x = torch.randn(5, 1, 3, 96).bfloat16()
        assert torch.equal(norm(x), plain(x))
        assert calls == [x.shape]
        longer = torch.randn(5, 2, 96).bfloat16()
        assert torch.equal(norm(longer), plain(longer))
        assert torch.equal(norm(x.float()), plain(x.float()))
    norm(x)  # with gradients
    assert len(calls) == 1


def test_every_norm_of_a_network_is_replaced_once_under_its_name():
    network = build_network()
    names, tokens = list(network.state_dict()), torch.tensor([[3, 4, 5]])
    before = network(tokens).logits
    assert take_step_norms(network) == 2 * 4 + 1  # two layers, with those of queries and keys
    assert take_step_norms(network) == 0
    assert list(network.state_dict()) == names
    torch.testing.assert_close(network(tokens).logits, before)
