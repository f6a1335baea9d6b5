import pytest
import torch
from torch import nn

from lit_qrl import formats
from lit_qrl.formats.kernels import gemm
from lit_qrl.network.denoising import Layout
from lit_qrl.network.quantized_linear import QuantizedLinear
from lit_qrl.rollout.diffusion.stack import Group, Stack, lay_together, members
from tests.networks import build_denoiser


def layers_of(network):
    return list(network.model.layers)


@torch.no_grad()
def test_layers_that_lie_together_are_one_product_with_the_same_states():
    network = build_denoiser()
    layout = Layout.of([4, 4], [6, 6], 4, 6, torch.device("cpu"))
    tokens = torch.randint(2, 20, (2, 10), generator=torch.Generator().manual_seed(0))
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    expected = layout.states(network, tokens)
    assert Group.of(members(layers_of(network)[0], "mlp")) is None
    assert lay_together(layers_of(network), ()) == 2 * len(layers_of(network))
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    stack = Stack.of(network)
    assert all(group is not None for each in stack.groups for group in each.values())
    angles = stack.angles(layout.positions)
    torch.testing.assert_close(stack.states(tokens, angles, None), expected)
    part = torch.tensor([5, 9])
    torch.testing.assert_close(stack.states(tokens, angles, None, part), expected[:, part])


def test_the_learners_own_weights_stay_where_they_are():
    network = build_denoiser()
    places = {name: p.data_ptr() for name, p in network.named_parameters()}
    assert lay_together(layers_of(network), {p.untyped_storage().data_ptr() for p in network.parameters()}) == 0
    assert {name: p.data_ptr() for name, p in network.named_parameters()} == places


def test_what_is_added_to_an_output_or_moved_away_ends_a_group():
    network = build_denoiser()
    lay_together(layers_of(network), ())
    layers = members(layers_of(network)[0], "self_attn")
    hook = layers[1].register_forward_hook(lambda *args: None)
    assert Group.of(layers) is None
    hook.remove()
    assert Group.of(layers) is not None
    layers[1].weight = nn.Parameter(layers[1].weight.clone())
    assert Group.of(layers) is None
    assert Group.of([nn.Linear(4, 4), nn.Linear(4, 4)]) is None  # with a bias


@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_row"])
def test_codes_are_multiplied_as_one(name, monkeypatch):
    monkeypatch.setattr(gemm, "fp8_gemm", lambda device, shape: True)
    product = lambda a, scale_a, b, scale_b, *rest: (a.float() * scale_a) @ (b.float() * scale_b).t()  # noqa: E731
    monkeypatch.setattr(gemm, "scaled_mm", product)
    format = formats.get(name)
    weights = [torch.randn(size, 32, generator=torch.Generator().manual_seed(size)) for size in (16, 32)]
    shared = max(weight.abs().amax() for weight in weights)
    layers = [QuantizedLinear(format, tuple(weight.shape)) for weight in weights]
    for layer, weight in zip(layers, weights, strict=True):
        layer.set_weight(format.quantize(weight, shared))
    x = torch.randn(2, 3, 32)
    expected = [layer(x) for layer in layers]
    block = nn.Module()
    block.self_attn, block.mlp = nn.Module(), nn.Module()
    for part, names in (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj"))):
        for index, child in enumerate(names):
            setattr(getattr(block, part), child, layers[index] if part == "mlp" else nn.Identity())
    assert lay_together([block], ()) == 1
    found = Group.of(layers)(x)
    for one, other, layer in zip(expected, found, layers, strict=True):
        torch.testing.assert_close(other, one)
        torch.testing.assert_close(layer(x), one)
    layers[1].scales = layers[1].scales * 2
    layers[1]._prepared.clear()
    assert (Group.of(layers) is None) == (name == "fp8_tensor")
