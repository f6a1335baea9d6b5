import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import Qwen2Config

from lit_qrl import formats
from lit_qrl.network.invariant import batch_invariant
from lit_qrl.precision import QATAligned, UnifiedFP8
from lit_qrl.precision.base import LowBitSource
from lit_qrl.precision.layers import together
from lit_qrl.precision.layers.together import LowBitTogether, Together, side_by_side


class Attention(nn.Module):
    def __init__(self, inputs=256, outputs=(256, 128, 128), bias=True):
        super().__init__()
        leaves = zip(("q_proj", "k_proj", "v_proj"), outputs, strict=True)
        for leaf, size in leaves:
            self.add_module(leaf, nn.Linear(inputs, size, bias=bias))


LEAVES = "q_proj", "k_proj", "v_proj"
PLUGINS = {
    "fp8_row": lambda: QATAligned("fp8_row"),
    "fp8_block": lambda: QATAligned("fp8_block", fuse=False),
    "int8_channel": lambda: QATAligned("int8_channel"),
    "unified": lambda: UnifiedFP8(backend="emulate"),
}


def decoder(plain):
    network = nn.Sequential(plain)
    network.config = Qwen2Config()
    return network


def converted(name, plain):
    network = decoder(copy.deepcopy(plain))
    plugin = PLUGINS[name]()
    plugin.convert_module(network)
    return network[0], plugin


@pytest.fixture
def on_cpu(monkeypatch):
    """Multiply together where the device has no product of codes either."""
    monkeypatch.setattr(LowBitTogether, "holds", lambda self, device: True)


def products(layer, x, leaves=LEAVES):
    """Outputs and gradients of some layers that read one tensor."""
    own = x.clone().requires_grad_()
    read = own * 1.0
    out = {leaf: getattr(layer, leaf)(read) for leaf in leaves}
    torch.manual_seed(1)
    sum(
        (one * torch.randn(layer.get_submodule(leaf).out_features).to(one)).sum() for leaf, one in sorted(out.items())
    ).backward()
    gradients = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {**out, **gradients, "x": own.grad}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", PLUGINS)
def test_outputs_and_gradients_are_those_of_the_layers_one_by_one(name, bias, on_cpu, monkeypatch):
    torch.manual_seed(0)
    plain, x = Attention(bias=bias), torch.randn(2, 70, 256)
    layer, _ = converted(name, plain)
    assert isinstance(layer.q_proj.together, LowBitTogether)
    assert {leaf.together for leaf in layer.children()} == {layer.q_proj.together}
    calls = []
    kind = type(layer.q_proj.together)
    compute = kind.compute
    monkeypatch.setattr(kind, "compute", lambda self, *given: calls.append(1) or compute(self, *given))
    made = products(layer, x, LEAVES[::-1])
    assert calls == [1]
    assert layer.q_proj.together._waiting is None
    alone, _ = converted(name, plain)
    for leaf in LEAVES:
        getattr(alone, leaf).together = None
    expected = products(alone, x)
    torch.testing.assert_close(made, expected, atol=1e-4, rtol=1e-4)


def test_codes_are_the_layers_own_and_follow_an_update(on_cpu):
    torch.manual_seed(0)
    layer, _ = converted("fp8_row", Attention())
    x = torch.randn(4, 256)
    products(layer, x)
    joined = layer.q_proj.together.quantized()
    place = 0
    for leaf in layer.children():
        q, made = leaf.quantized(), formats.get("fp8_row").quantize(leaf.weight)
        assert torch.equal(q.codes.view(torch.uint8), made.codes.view(torch.uint8))
        assert torch.equal(q.scales, made.scales)
        assert q.codes.data_ptr() == joined.codes[place:].data_ptr()  # no second copy
        place += leaf.out_features
    with torch.no_grad():
        layer.k_proj.weight.mul_(2.0)
    before = joined.scales.clone()
    after = layer.q_proj.together.quantized().scales
    assert torch.equal(after[256:384], 2 * before[256:384])
    assert torch.equal(after[:256], before[:256])
    again = copy.deepcopy(layer)
    with torch.no_grad():
        again.v_proj.weight.mul_(4.0)
    assert torch.equal(again.q_proj.together.quantized().scales[384:], 4 * after[384:])
    assert torch.equal(layer.q_proj.together.quantized().scales, after)


def test_what_an_engine_is_lent_is_what_the_forward_pass_multiplies(on_cpu):
    torch.manual_seed(0)
    layer, plugin = converted("fp8_row", Attention())
    source = LowBitSource(plugin, SimpleNamespace(network=decoder(layer)), plugin.format)
    held = source.held()
    lent = [held(f"0.{leaf}", getattr(layer, leaf).weight) for leaf in LEAVES]
    products(layer, torch.randn(4, 256))
    joined = layer.q_proj.together.quantized().codes
    assert [one.codes.data_ptr() for one in lent] == [part.data_ptr() for part in joined.split([256, 128, 128])]


def test_outputs_wait_for_their_own_layer_tensor_and_kind_of_pass(on_cpu):
    torch.manual_seed(0)
    layer, _ = converted("fp8_row", Attention())
    x = torch.randn(4, 256)
    with torch.no_grad():
        layer.q_proj(x)
    assert layer.k_proj(x).requires_grad  # not the one that was made without a graph
    before = layer.v_proj(x)
    x.mul_(2.0)
    assert not torch.equal(layer.k_proj(x), layer.k_proj(x / 2))
    assert torch.equal(layer.v_proj(x / 2), before)
    assert torch.equal(layer.q_proj(x), layer.q_proj(x))


def test_frozen_layers_get_no_gradient(on_cpu):
    torch.manual_seed(0)
    for name in PLUGINS:
        layer, _ = converted(name, Attention())
        layer.q_proj.requires_grad_(False)
        x = torch.randn(4, 256)
        sum(getattr(layer, leaf)(x).sum() for leaf in LEAVES).backward()
        assert layer.q_proj.weight.grad is None
        assert layer.k_proj.weight.grad.shape == (128, 256)
        layer.requires_grad_(False)
        assert not layer.k_proj(x.clone()).requires_grad


@pytest.mark.parametrize(
    ("plugin", "outputs", "fits"),
    [
        ("fp8_row", (100, 30, 30), True),
        ("fp8_block", (256, 128, 128), True),
        ("fp8_block", (256, 64, 64), False),  # a block of codes would have rows of two layers
        ("fp8_tensor", (256, 128, 128), False),
        ("int4_group", (256, 128, 128), False),
    ],
)
def test_only_layers_that_share_no_scale_are_joined(plugin, outputs, fits):
    network = decoder(Attention(outputs=outputs))
    QATAligned(plugin).convert_module(network)
    assert (network[0].q_proj.together is not None) is fits
    assert not fits or not network[0].q_proj.together.takes(torch.randn(4, 256))  # a CPU multiplies no codes
    unknown = nn.Sequential(Attention(outputs=outputs))  # of no family
    QATAligned(plugin).convert_module(unknown)
    assert unknown[0].q_proj.together is None
    assert together.reading_alike(network, LEAVES[:2]) == []  # something else is in the third's place


def test_what_must_not_depend_on_the_batch_is_multiplied_one_by_one():
    layers = list(Attention().children())
    group = Together(layers)
    x = torch.randn(2, 256)
    assert group.takes(x)
    with batch_invariant(True):
        assert not group.takes(x)
    with torch.inference_mode():
        assert not group.takes(x + 1)


def test_side_by_side_copies_only_what_lies_elsewhere():
    whole = torch.arange(24.0).view(4, 6)
    a, b, c = whole.split([1, 2, 3], dim=1)
    assert side_by_side((a, b, c)).data_ptr() == whole.data_ptr()
    assert side_by_side((b, c)).shape == (4, 5)
    for parts in ((b, a, c), (a, b, c.clone()), (b, c)):
        assert torch.equal(side_by_side(parts), torch.cat(parts, dim=1))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8_row", "fp8_block", "int8_channel", "unified"])
def test_outputs_on_the_device_have_the_bits_of_the_layers_one_by_one(name):
    torch.manual_seed(0)
    plain = Attention(1536, (1536, 256, 256)).cuda().bfloat16()
    plugin = (lambda: UnifiedFP8(backend="torch")) if name == "unified" else PLUGINS[name]
    x = torch.randn(1, 2300, 1536, device="cuda", dtype=torch.bfloat16)
    found = []
    for joined in (True, False):
        network = decoder(copy.deepcopy(plain))
        plugin().convert_module(network)
        layer = network[0]
        assert layer.q_proj.together.takes(x)
        if not joined:
            for leaf in layer.children():
                leaf.together = None
        found.append(products(layer, x))
    made, expected = found
    for key, one in expected.items():
        if key in LEAVES:
            assert torch.equal(made[key], one), key
        else:
            assert (made[key] - one).norm() <= 0.02 * one.norm(), key
