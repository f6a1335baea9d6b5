import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lit_qrl import formats
from lit_qrl.precision.layers.packed_linear import PackedLinear
from tests.formats.oracle import rounded

FORMATS = ("nvfp4", "mxfp4", "nf4", "int4_group:group_size=32")


def packed(name="nvfp4", shape=(64, 32), bias=True):
    torch.manual_seed(0)
    format = formats.get(name)
    linear = nn.Linear(*shape, bias=bias)
    layer = PackedLinear.from_linear(linear, format, cache=False)
    layer.set_weight(format.quantize(linear.weight))
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_a_packed_layer_multiplies_and_differentiates_as_its_weight_would(name, dtype):
    torch.manual_seed(0)
    format = formats.get(name)
    linear = nn.Linear(64, 32).to(dtype)
    layer = PackedLinear.from_linear(linear, format, cache=False)
    layer.set_weight(format.quantize(linear.weight))
    plain = copy.deepcopy(linear)
    plain.weight.data = format.dequantize(layer.weight, dtype)
    inputs = [torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(1)).to(dtype) for _ in range(2)]
    for x in inputs:
        x.requires_grad_()
    out, expected = layer(inputs[0]), plain(inputs[1])
    assert torch.equal(out, expected)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    expected.backward(upstream)
    assert not any(parameter.requires_grad for name, parameter in layer.named_parameters() if name != "bias")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(inputs[0]), layer.bfloat16()(inputs[0].bfloat16()))
    assert torch.allclose(inputs[0].grad, inputs[1].grad, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


# Which inputs share a scale: one tensor's, one token's, or 128 of one token, of which there are 64.
INPUTS = {"fp8_tensor": "tensor", "fp8_row": "token", "fp8_block": "group", "int8_channel": "int8"}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", INPUTS)
def test_a_layer_of_8_bits_multiplies_rounded_inputs_and_passes_gradients_straight_through(name, bias):
    """Inputs are rounded to codes under their scale in a loop; the weight's codes are its format's."""
    layer = packed(name, bias=bias)
    layer.kernel = "format"
    x = torch.randn(2, 3, 64, requires_grad=True)
    weight = layer.codes.double() * layer.scales.double()
    out = layer(x)
    expected = rounded(x.detach().flatten(0, 1), INPUTS[name]).view(x.shape) @ weight.t()
    expected = expected if layer.bias is None else expected + layer.bias.double()
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    torch.testing.assert_close(x.grad.double(), upstream.double() @ weight, atol=1e-5, rtol=1e-5)
    assert not layer._prepared


def test_an_input_of_several_layers_is_taken_whole_as_by_the_sampler():
    """What a layer that quantizes its inputs gives is no view, so that a model may write to it."""
    layer = packed("fp8_row")
    layer.kernel = "format"
    x = torch.randn(2, 3, 64, requires_grad=True)
    out = layer(x)
    expected = layer.format.linear(x.detach(), layer.weight, layer.bias)
    assert torch.equal(out, expected)
    out += 1.0
    assert torch.equal(out.detach(), expected + 1.0)


@pytest.mark.parametrize("name", ["nvfp4", "fp8_row"])
def test_nothing_of_full_size_is_kept_for_the_backward_pass(name):
    format = formats.get(name)
    linear = nn.Linear(256, 512, bias=False)
    layer = PackedLinear.from_linear(linear, format, cache=False)
    layer.kernel = "format" if name == "fp8_row" else "dequantize"
    layer.set_weight(format.quantize(linear.weight))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        layer(torch.randn(4, 256, requires_grad=True))
    assert max(saved, default=0) < 256 * 512
    assert not layer._prepared


def test_codes_that_wait_stay_on_the_host_until_they_are_asked_for():
    layer, other = packed(), packed()
    layer.wait_on_host()
    assert layer.waits_on_host
    layer.to("meta")
    other.to("meta")
    assert layer.codes.device.type == "cpu"
    assert other.codes.device.type == "meta"
    assert layer.weight_on(torch.device("meta")).codes.device.type == "meta"
    x = torch.randn(2, 64)
    layer.bias = None
    assert torch.equal(layer(x), x @ packed().dequantized(torch.float32).t())


@pytest.mark.parametrize("name", ["nvfp4", "fp8_row"])
def test_a_layer_of_which_a_process_holds_a_part_multiplies_by_the_whole(name, monkeypatch):
    """Another process's part comes when the product asks for it, and goes with it."""
    layer, whole, other = packed(name), packed(name), packed(name)
    for one in (layer, whole):
        one.kernel = "format" if name == "fp8_row" else "dequantize"
    other.divide(SimpleNamespace(size=lambda: 2, rank=lambda: 1))
    layer.divide(SimpleNamespace(size=lambda: 2, rank=lambda: 0))
    assert layer.codes.untyped_storage().nbytes() == whole.codes.untyped_storage().nbytes() / 2
    theirs = {layer.codes.data_ptr(): other.codes, layer.scales.data_ptr(): other.scales}

    def gather(found, part, group):
        found[0].copy_(part)
        found[1].copy_(theirs[part.data_ptr()])

    monkeypatch.setattr("lit_qrl.network.shards.all_gather", gather)
    x = torch.randn(3, 64, requires_grad=True)
    out = layer(x)
    assert torch.equal(out, whole(x))
    one, other = layer.weight, whole.weight
    assert torch.equal(one.codes.view(torch.uint8), other.codes.view(torch.uint8))
    assert torch.equal(one.scales.float(), other.scales.float())
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(gradient, torch.autograd.grad(whole(x).sum(), x)[0])
