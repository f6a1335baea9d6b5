"""On a CUDA device: norms and gated activations that leave their kernel quantized, against the plain modules."""

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from lit_qrl.formats import FP8Block
from lit_qrl.formats.kernels import dispatch
from lit_qrl.precision import QATAligned, UnifiedFP8
from lit_qrl.precision.layers.one_pass import OnePassGatedMLP, OnePassRMSNorm
from tests.formats.oracle import bits

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


def same(made, expected):
    assert torch.equal(bits(made[0]), bits(expected[0]))
    assert torch.equal(made[1], expected[1])


def test_the_gated_activation_is_the_module_s_bit_for_bit():
    torch.manual_seed(0)
    parts = nn.Module()
    parts.gate_proj, parts.up_proj, parts.down_proj = (nn.Identity() for _ in range(3))
    parts.act_fn = nn.SiLU()
    mlp = OnePassGatedMLP(parts, columns=True)
    gate, up = (torch.randn(3, 77, 1024, device=DEVICE, dtype=torch.bfloat16) * 4 for _ in range(2))
    for x in (gate, up):
        x.requires_grad_()
    made = []
    from lit_qrl.precision.layers.one_pass import _Gated

    y = _Gated.apply(gate, up, True, made)
    expected = mlp.act_fn(gate) * up
    assert torch.equal(bits(y), bits(expected))
    plain = dispatch.e4m3_tiles(expected.detach().view(-1, 1024), True, True)
    same(made[0], plain[0])
    same(made[1], plain[1])
    upstream = torch.randn_like(y)
    ours = torch.autograd.grad(y, (gate, up), upstream)
    theirs = torch.autograd.grad(expected, (gate, up), upstream)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.float() - other.float()).norm() / other.float().norm() < 2.0**-7


def network():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256, hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=128, max_position_embeddings=256, attn_implementation="sdpa",
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to(DEVICE, torch.bfloat16)


def gradients(model, tokens):
    logits = model(input_ids=tokens, use_cache=False).logits
    logits.float().logsumexp(-1).mean().backward()
    return logits, {name: p.grad.float() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "plugin", [lambda fuse: UnifiedFP8("torch", fuse=fuse), lambda fuse: QATAligned(FP8Block(), fuse=fuse)]
)
def test_a_network_in_one_pass_computes_and_learns_what_the_plain_one_does(plugin):
    tokens = torch.randint(0, 256, (2, 100), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1))
    truth, exact = gradients(network().float(), tokens)
    results = []
    for fuse in (False, True):
        model = network()
        plugin(fuse).convert_module(model)
        assert fuse == any(isinstance(part, OnePassRMSNorm) for part in model.modules())
        results.append(gradients(model, tokens))
    (logits, plain), (made, ours) = results
    assert (made - truth).norm() <= 1.1 * (logits - truth).norm()
    assert plain.keys() == ours.keys() == exact.keys()
    for name, gradient in exact.items():
        # FP8 puts 4 to 20 % between a gradient and that of fp32. A last bit that differs after a norm moves some codes
        # of the layers below to their neighbours: as wrong as before (at most 1.04 of it on a CPU with stand-ins of the
        # kernels, three seeds), and the two nearer to each other (0.42) than to fp32.
        error = (plain[name] - gradient).norm()
        assert (ours[name] - gradient).norm() <= 1.1 * error, name
        assert (ours[name] - plain[name]).norm() <= 0.6 * error, name
