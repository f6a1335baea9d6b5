import copy

import pytest
import torch

from lit_qrl.formats.kernels import dispatch
from lit_qrl.network.hidden import recomputation
from lit_qrl.network.padding_free import enable_padding_free
from lit_qrl.precision.layers import joined_linear
from lit_qrl.precision.layers.one_pass import OnePassRMSNorm, take_one_pass
from lit_qrl.precision.layers.residual import ResidualLayer, join_layers, join_residuals
from tests.network.test_padding_free import groups, policy_of
from tests.networks import build_network
from tests.precision.layers.test_one_pass import run, stand_in, wide

TOKENS = torch.arange(12).view(2, 6)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("across", [False, True])
def test_layers_compute_and_learn_what_they_did(across, kernels, recomputed, monkeypatch):
    plain, model = wide(), wide()
    keys = list(model.state_dict())
    take_one_pass(model, True)
    for _ in range(2):  # the second changes nothing
        join_residuals(model, across)
        assert sum(isinstance(part, ResidualLayer) for part in model.modules()) == 2
    assert list(model.state_dict()) == keys
    assert {type(layer).__name__ for layer in model.model.layers} == {"Qwen3DecoderLayer"}
    calls = stand_in(monkeypatch) if kernels else []
    if recomputed:
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": recomputation})
        model.train()
    (logits, gradients), (expected, others) = run(model, TOKENS), run(plain, TOKENS)
    assert torch.equal(logits, expected)
    assert [made for made, _ in calls].count("norm") == (5 + 4 * recomputed) * kernels
    assert [made for made, _ in calls if made != "norm"] == [False] * 2 * kernels  # not again: nobody reads it
    torch.testing.assert_close(gradients, others, atol=1e-6, rtol=1e-4)
    twin = copy.deepcopy(model)
    assert all(isinstance(layer, ResidualLayer) for layer in twin.model.layers)
    assert torch.equal(twin(input_ids=TOKENS, use_cache=False).logits, expected)


def test_norms_of_others_and_frozen_inputs_take_the_library_s_order(monkeypatch):
    plain, model = wide(), wide()
    take_one_pass(model, True)
    join_residuals(model)
    stand_in(monkeypatch)
    for one in (plain, model):
        one.model.embed_tokens.weight.requires_grad_(False)
    assert torch.equal(run(model.requires_grad_(True), TOKENS)[0], run(plain.requires_grad_(True), TOKENS)[0])
    layer = model.model.layers[0]
    own = layer.input_layernorm
    layer.input_layernorm = type("Other", (OnePassRMSNorm,), {})(own, columns=False, codes="")
    asked = []
    monkeypatch.setattr(OnePassRMSNorm, "forward", lambda self, x, *a, **o: asked.append((a, o)) or x)
    x, turned = torch.zeros(1, 2, 128), model.model.rotary_emb(torch.zeros(1), torch.arange(2)[None])
    layer((x, x), position_embeddings=turned)
    assert asked == [((), {})] * 2


def test_products_keep_what_a_norm_s_output_is_made_of_instead_of_it(monkeypatch):
    plain, model = wide(), wide()
    take_one_pass(model, True)
    join_layers(model)
    calls = stand_in(monkeypatch)
    monkeypatch.setattr(joined_linear._Plain, "takes", lambda self, x: True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.data_ptr()) or x, lambda x: x):
        logits = model(input_ids=TOKENS, use_cache=False).logits
    made = [made for made, _ in calls]
    logits.float().logsumexp(-1).square().mean().backward()
    # in the backward pass: what queries, keys and values of two layers read, and gate and up
    assert [o.get("rstd") is not None for _, o in calls[len(made) :]].count(True) == 4
    expected, others = run(plain, TOKENS)
    assert torch.equal(logits, expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, others[name], atol=1e-6, rtol=1e-4, msg=name)
    outputs = []
    norms = [layer.input_layernorm for layer in model.model.layers]
    hooks = [norm.register_forward_hook(lambda m, a, out: outputs.append(out[0])) for norm in norms]
    model(input_ids=TOKENS, use_cache=False)
    assert dispatch.kept(outputs[0], dispatch.RECIPE) is not None
    outputs[0].mul_(1.0)  # written to: it is what is read, not what it was made of
    assert dispatch.kept(outputs[0], dispatch.RECIPE) is None
    for hook in hooks:
        hook.remove()


def of_policy(network, batch, weights):
    policy = policy_of(network)
    for _ in range(2):  # the second adds to gradients that are there
        scores = policy(batch, 0.9)
        (scores.logprobs * weights).sum().backward()
    return scores.logprobs.detach().float(), {name: p.grad.float() for name, p in network.named_parameters()}


@pytest.mark.gpu
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_network_on_the_device_learns_what_the_plain_one_does(family, recomputed):
    from transformers import Qwen2Config, Qwen3Config

    sizes = {"hidden_size": 384, "intermediate_size": 1024, "num_attention_heads": 6, "num_key_value_heads": 2}
    kind = {"qwen2": Qwen2Config, "qwen3": Qwen3Config}[family]
    network = build_network(kind, gain=2, bias=0.1, **sizes, head_dim=64, max_position_embeddings=512)
    batch = groups(prompts=24, size=8, longest=40).to("cuda")
    weights = torch.linspace(-1, 1, batch.mask.numel(), device="cuda").view(batch.mask.shape)
    results = []
    for dtype, fused in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        own = copy.deepcopy(network).to("cuda", dtype)
        assert enable_padding_free(own)
        if fused:
            take_one_pass(own, True)
            join_layers(own)
            if recomputed:
                own.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": recomputation})
                own.train()
        results.append(of_policy(own, batch, weights))
    (exact, truth), (plain, theirs), (made, ours) = results
    assert (made - exact).norm() <= 1.2 * (plain - exact).norm()
    assert ours.keys() == theirs.keys()
    for name, gradient in truth.items():
        error = (theirs[name] - gradient).norm()
        assert (ours[name] - gradient).norm() <= 1.5 * error + 5e-3 * gradient.norm(), name
