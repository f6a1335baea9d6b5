import pytest
import torch
from transformers import Qwen3Config

from lit_qrl.network.denoising import Layout
from lit_qrl.network.structure import cached
from lit_qrl.precision.layers.one_pass import take_one_pass
from lit_qrl.rollout.diffusion.stack import CanvasCache, Stack
from tests.networks import build_denoiser, build_network


def canvas(prompts):
    layout = Layout.of(prompts, [6, 6], 4, 6, torch.device("cpu"))
    return layout, torch.randint(2, 20, (2, 10), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("prompts", [[4, 4], [4, 2]])
@pytest.mark.parametrize("heads", [4, 2])
@torch.no_grad()
def test_states_are_those_of_the_librarys_forward(prompts, heads):
    network = build_denoiser(num_attention_heads=4, num_key_value_heads=heads)
    stack, (layout, tokens) = Stack.of(network), canvas(prompts)
    angles = stack.angles(layout.positions)
    expected = layout.states(network, tokens)
    found = stack.states(tokens, angles, layout.valid)
    there = slice(None) if layout.valid is None else layout.valid
    torch.testing.assert_close(found[there], expected[there])
    part = torch.tensor([4, 5, 7])
    torch.testing.assert_close(stack.states(tokens, angles, layout.valid, part), expected[:, part])
    assert torch.equal(stack.states(tokens, angles, layout.valid), found)  # what is written in place is its own


@pytest.mark.parametrize("prompts", [[4, 4], [4, 2]])
@torch.no_grad()
def test_kept_columns_are_those_of_the_librarys_forward(prompts):
    network = build_denoiser()
    stack, (layout, tokens) = Stack.of(network), canvas(prompts)
    cos, sin = stack.angles(layout.positions)
    ours, theirs = CanvasCache(2, 10), CanvasCache(2, 10)
    whole = layout.states(network, tokens, **cached(network, theirs))
    at = torch.arange(4, 10)
    torch.testing.assert_close(stack.states(tokens, (cos, sin), layout.valid, at, ours), whole[:, at])
    ours.at = theirs.at = at
    later = tokens[:, at].flip(0)
    expected = layout.states(network, later, at, **cached(network, theirs))
    angles, part = (cos[:, at], sin[:, at]), torch.arange(3)
    torch.testing.assert_close(stack.states(later, angles, layout.valid, part, ours), expected[:, :3])
    assert not torch.allclose(expected, whole[:, at])


def test_layers_that_are_not_known_are_the_librarys():
    assert Stack.of(build_network(Qwen3Config, is_causal=False, mask_token_id=3)) is None
    network = build_denoiser()
    take_one_pass(network, True)
    assert Stack.of(network) is not None
    network.set_attn_implementation("eager")
    assert Stack.of(network) is None


@pytest.mark.gpu
@pytest.mark.parametrize("prompts", [[4, 4], [4, 2]])
@torch.no_grad()
def test_states_on_a_gpu_are_those_of_the_librarys_forward(prompts):
    network = build_denoiser(hidden_size=256, intermediate_size=512, head_dim=64, dtype=torch.bfloat16).cuda()
    layout, tokens = canvas(prompts)
    layout = Layout(layout.positions.cuda(), None if layout.valid is None else layout.valid.cuda())
    expected = layout.states(network, tokens.cuda()).float()
    take_one_pass(network, True)
    stack = Stack.of(network)
    angles = stack.angles(layout.positions)
    there = slice(None) if layout.valid is None else layout.valid
    found = stack.states(tokens.cuda(), angles, layout.valid).float()
    scale = expected[there].abs().mean()
    assert float((found - expected)[there].abs().mean() / scale) < 0.01
    part = torch.tensor([4, 5, 9], device="cuda")
    some = stack.states(tokens.cuda(), angles, layout.valid, part).float()
    assert float((some - expected[:, part]).abs().mean() / scale) < 0.01
