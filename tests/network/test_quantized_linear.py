import pytest
import torch
from torch import nn

from lit_qrl import formats
from lit_qrl.network.quantized_linear import QuantizedLinear, leave_to_each_rank


@pytest.mark.parametrize("name", formats.names())
def test_a_quantized_linear_multiplies_as_its_format_does(name):
    torch.manual_seed(0)
    format = formats.get(name)
    linear = nn.Linear(256, 96)
    layer = QuantizedLinear.from_linear(linear, format)
    q = format.quantize(linear.weight)
    layer.load({key.removeprefix("x."): tensor for key, tensor in format.export(q, "x")})
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(5, 256).to(dtype)
        assert torch.equal(layer.to(dtype)(x), format.linear(x, q, linear.bias.to(dtype)))
        assert torch.equal(layer.dequantized(dtype), format.dequantize(q, dtype))
    assert layer.weight.shape == (96, 256)
    assert list(layer.state_dict()) == ["bias"]


def test_the_operand_is_made_once_unless_told_otherwise():
    format = formats.get("int4_group", group_size=32)
    q = format.quantize(torch.randn(32, 64))
    cached, plain = QuantizedLinear(format, (32, 64)), QuantizedLinear(format, (32, 64), cache=False)
    with pytest.raises(RuntimeError, match="no weight yet"):
        plain(torch.ones(1, 64))
    for layer in (cached, plain):
        layer.set_weight(q)
    assert cached.prepared(torch.float32) is cached.prepared(torch.float32)
    assert plain.prepared(torch.float32) is not plain.prepared(torch.float32)


def test_casting_a_module_leaves_codes_and_scales_alone():
    format = formats.get("fp8_tensor")
    layer = QuantizedLinear(format, (32, 64), bias=torch.zeros(32))
    layer.set_weight(format.quantize(torch.randn(32, 64)))
    layer.to(torch.bfloat16)
    assert layer.codes.dtype == torch.float8_e4m3fn
    assert layer.scales.dtype == torch.float32
    assert layer.bias.dtype == torch.bfloat16


def test_codes_and_scales_are_no_ones_to_send():
    model = nn.ModuleDict({"a": QuantizedLinear(formats.get("nvfp4"), (32, 64)), "b": nn.Linear(4, 4)})
    leave_to_each_rank(model)
    leave_to_each_rank(model)
    assert model._ddp_params_and_buffers_to_ignore == ["a.codes", "a.global_scale", "a.scales"]
