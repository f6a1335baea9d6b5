"""Attention whose rows are turned while they are laid out: a stand-in of the kernels is asked for it."""

import copy
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import GraniteConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import rotate_half

from lit_qrl.formats import kernels
from lit_qrl.network.hidden import recomputation
from lit_qrl.network.padding_free import enable_padding_free
from lit_qrl.network.structure import CACHE_ARGUMENTS
from lit_qrl.precision.layers import flat_attention, joined_linear
from lit_qrl.precision.layers.flat_attention import FlatAttention, turn_while_laid_out
from lit_qrl.precision.layers.one_pass import OnePassRMSNorm, take_one_pass
from lit_qrl.precision.layers.residual import join_layers
from tests.network.test_padding_free import groups
from tests.networks import build_network
from tests.precision.layers.test_one_pass import stand_in
from tests.precision.layers.test_residual import of_policy


def turned(q, k, v, cos, sin, index):
    q, k = (x * cos[:, None] + rotate_half(x) * sin[:, None] for x in (q, k))
    return tuple(x.index_select(0, index) for x in (q, k, v))


def turned_back(grads, cos, sin, place, copies):
    made = []
    for number, grad in enumerate(grads):
        summed = grad.index_select(0, place)
        several = grad[copies.clamp(min=0)].masked_fill((copies < 0)[..., None, None], 0.0)
        summed[: len(copies)] = several.sum(1)
        if number < 2:
            crossed = summed * sin[:, None]
            half = grad.shape[-1] // 2
            summed = summed * cos[:, None] + torch.cat((crossed[..., half:], -crossed[..., :half]), dim=-1)
        made.append(summed)
    return tuple(made)


@pytest.fixture
def calls(monkeypatch):
    asked = []
    module = SimpleNamespace(turned=lambda *a: asked.append("forth") or turned(*a), turned_back=turned_back)
    monkeypatch.setitem(sys.modules, "lit_qrl.formats.kernels.turned_triton", module)
    monkeypatch.setattr(kernels, "turned_triton", module, raising=False)
    known = flat_attention._known
    monkeypatch.setattr(flat_attention.dispatch, "available", lambda x, kernel: False)
    monkeypatch.setattr(flat_attention, "_known", lambda *a: not known(*a))
    return asked


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("kind", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
def test_log_probs_and_gradients_stay(kind, recomputed, calls):
    plain = build_network(kind, bias=0.1, **({"sliding_window": None} if kind is MistralConfig else {}))
    network, batch = copy.deepcopy(plain), groups()
    for _ in range(2):  # the second changes nothing
        turn_while_laid_out(network)
        assert sum(isinstance(part, FlatAttention) for part in network.modules()) == 2
    assert list(network.state_dict()) == list(plain.state_dict())
    assert sum(isinstance(part, OnePassRMSNorm) for part in network.modules()) == 4 * (kind is Qwen3Config)
    for one in (plain, network):
        assert enable_padding_free(one)
        if recomputed:
            one.gradient_checkpointing_enable({"use_reentrant": False})
            one.train()
    weights = torch.linspace(-1, 1, batch.mask.numel()).view(batch.mask.shape)
    made, gradients = of_policy(network, batch, weights)
    assert len(calls) == 2 * 2 * (1 + recomputed)
    expected, others = of_policy(plain, batch, weights)
    torch.testing.assert_close(made, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradients, others, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [Qwen2Config, Qwen3Config])
def test_a_network_with_every_kernel_learns_the_same_whichever_layers_are_computed_again(kind, calls, monkeypatch):
    """In bf16, bit by bit: what is computed again is what was kept; and as close to fp32 as the plain network is."""
    kernels = stand_in(monkeypatch)
    products = []
    multiply = joined_linear._Plain.compute
    monkeypatch.setattr(joined_linear._Plain, "takes", lambda self, x: x.dtype == torch.bfloat16)
    monkeypatch.setattr(joined_linear._Plain, "compute", lambda *a: products.append(1) or multiply(*a))
    network, batch = build_network(kind, gain=2, bias=0.1, num_hidden_layers=3), groups()
    weights = torch.linspace(-1, 1, batch.mask.numel()).view(batch.mask.shape)

    def learned(again, dtype=torch.bfloat16, fused=True):
        own = copy.deepcopy(network).to(dtype)
        assert enable_padding_free(own)
        if fused:
            take_one_pass(own, True)
            join_layers(own)
        own.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": recomputation})
        own.train()
        for number, layer in enumerate(own.model.layers):
            layer.gradient_checkpointing = number in again
        for asked in (calls, kernels, products):
            asked.clear()
        return of_policy(own, batch, weights)

    exact, truth = learned((), torch.float32, fused=False)
    plain, theirs = learned((), fused=False)
    assert not calls + kernels + products
    kept, ours = learned(())
    assert len(calls) == 2 * 3
    # queries, keys and values; their output; gate and up: three layers, twice; down is in the gated product
    counts = len(products), [made for made, _ in kernels].count("norm")
    assert min(counts) >= 2 * 3 * 2
    for again in ((0, 1, 2), (1,), (0, 2)):
        made, gradients = learned(again)
        assert len(calls) == 2 * (3 + len(again))
        # once more for a layer that is computed again
        assert len(products) * 3 == counts[0] * (3 + len(again))
        assert [made for made, _ in kernels].count("norm") > counts[1]
        assert torch.equal(made, kept)
        assert gradients.keys() == ours.keys() == truth.keys()
        for name, gradient in ours.items():
            assert torch.equal(gradients[name], gradient), name
    assert (kept - exact).norm() <= 1.2 * (plain - exact).norm()
    for name, gradient in truth.items():
        error = (theirs[name] - gradient).norm()
        assert (ours[name] - gradient).norm() <= 1.5 * error + 5e-3 * gradient.norm(), name


def test_other_families_and_rows_without_a_layout_are_left_to_the_library(calls):
    other = build_network(GraniteConfig)
    turn_while_laid_out(other)
    assert not any(isinstance(part, FlatAttention) for part in other.modules())
    network = build_network()
    tokens = torch.arange(2, 8)[None]
    expected = network(input_ids=tokens, use_cache=True).logits
    turn_while_laid_out(network)
    assert torch.equal(network(input_ids=tokens, use_cache=True).logits, expected)
    assert isinstance(copy.deepcopy(network).model.layers[0].self_attn, FlatAttention)
    assert calls == []


def test_the_kernel_is_asked_for_16_bits_and_whole_heads_alone(monkeypatch):
    monkeypatch.setattr(flat_attention.dispatch, "available", lambda x, kernel: True)
    module = SimpleNamespace(config=SimpleNamespace(_attn_implementation="lit_qrl_padding_free"), head_dim=8)
    x, turns = torch.zeros(1, 5, 16).bfloat16(), torch.zeros(1, 5, 8).bfloat16()
    assert flat_attention._known(module, x, (turns, turns), {})
    assert not any(flat_attention._known(module, x, (turns, turns), {name: object()}) for name in CACHE_ARGUMENTS)
    assert not flat_attention._known(module, x.float(), (turns.float(),) * 2, {})
    assert not flat_attention._known(module, x, (turns[..., :4],) * 2, {})
    assert not flat_attention._known(module, torch.cat([x, x]), (turns, turns), {})
    module.config._attn_implementation = "sdpa"
    assert not flat_attention._known(module, x, (turns, turns), {})
