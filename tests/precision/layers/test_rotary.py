"""The rotation of queries and keys: a stand-in of the kernel is asked for it."""

import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, rotate_half

from lit_qrl.formats import kernels
from lit_qrl.precision.layers import rotary

PLAIN = apply_rotary_pos_emb


def rotate(x, cos, sin, back=False):
    cos, sin = cos[:, None], sin[:, None]
    if not back:
        return x * cos + rotate_half(x) * sin
    turned = x * sin
    half = x.shape[-1] // 2
    return x * cos + torch.cat((turned[..., half:], -turned[..., :half]), dim=-1)


def problem(n=5, heads=3, key_heads=1, dim=8, dtype=torch.bfloat16, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, n, heads, dim), (1, n, key_heads, dim), (1, n, dim), (1, n, dim))
    q, k, cos, sin = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    return q.transpose(1, 2), k.transpose(1, 2), cos, sin


def trained(function, q, k, cos, sin):
    leaves = [x.detach().clone().requires_grad_() for x in (q, k)]
    outs = function(*leaves, cos, sin)
    torch.autograd.backward(outs, [torch.linspace(-1, 2, x.numel()).view(x.shape).to(x) for x in outs])
    return [*(out.detach() for out in outs), *(leaf.grad for leaf in leaves)]


@pytest.fixture
def calls(monkeypatch):
    asked = []
    module = SimpleNamespace(rotate=lambda *a, **o: asked.append(o) or rotate(*a, **o))
    monkeypatch.setitem(sys.modules, "lit_qrl.formats.kernels.rotary_triton", module)
    monkeypatch.setattr(kernels, "rotary_triton", module, raising=False)
    monkeypatch.setattr(rotary.dispatch, "available", lambda x, kernel: True)
    return asked


@pytest.mark.parametrize("rows", ["flat", "of one token"])
def test_rows_are_turned_by_the_kernel_both_ways(rows, calls):
    q, k, cos, sin = problem()
    if rows == "of one token":  # each by its own angle
        q, k = (x[0].transpose(0, 1)[:, :, None] for x in (q, k))
        cos, sin = cos[0][:, None], sin[0][:, None]
    got = trained(rotary._one_pass(PLAIN), q, k, cos, sin)
    assert calls == [{}, {}, {"back": True}, {"back": True}]
    assert got[0].shape == q.shape
    torch.testing.assert_close(got, trained(PLAIN, q, k, cos, sin), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("case", ["batch", "fp32", "partial", "dimension"])
def test_what_the_kernel_does_not_know_takes_the_plain_operations(case, calls):
    q, k, cos, sin = problem(dtype=torch.float32 if case == "fp32" else torch.bfloat16)
    if case == "batch":
        q, k, cos, sin = (torch.cat([x, x]) for x in (q, k, cos, sin))
    turned = rotary._one_pass(PLAIN)
    if case == "dimension":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        assert torch.equal(turned(q, k, cos, sin, unsqueeze_dim=2)[0], PLAIN(q, k, cos, sin, unsqueeze_dim=2)[0])
    elif case == "partial":
        with pytest.raises(RuntimeError, match="size of tensor"):  # the library's own answer
            turned(q, k, cos[..., :4], sin[..., :4])
    else:
        assert torch.equal(turned(q, k, cos, sin)[1], PLAIN(q, k, cos, sin)[1])
    assert not calls


def test_a_family_s_module_is_wrapped_once(monkeypatch):
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", PLAIN)
    network = LlamaForCausalLM(
        LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    )
    before = network(torch.tensor([[1, 2, 3]])).logits
    rotary.rotate_in_one_pass(network)
    once = modeling_llama.apply_rotary_pos_emb
    assert once is not PLAIN
    rotary.rotate_in_one_pass(network)
    assert modeling_llama.apply_rotary_pos_emb is once
    assert torch.equal(network(torch.tensor([[1, 2, 3]])).logits, before)
