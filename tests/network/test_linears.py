import pytest
import torch
from torch import nn

from lit_qrl import formats
from lit_qrl.errors import ConfigError
from lit_qrl.network.linears import QuantizedLinear, fused_group, fused_groups, quantizable_linears, swap_linears


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(64, 32)
        self.o_proj = nn.Linear(64, 64, bias=False)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(64, 4, bias=False)
        self.gate_proj, self.up_proj = nn.Linear(64, 128), nn.Linear(64, 128)
        self.down_proj = nn.Linear(128, 64)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.mlp, self.norm = Attention(), Experts(), nn.LayerNorm(64)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 64)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(64, 10, bias=False)

    def get_output_embeddings(self):
        return self.head


PROJECTIONS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"] + [
    f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")
]


def test_every_linear_but_head_and_routers_is_quantizable():
    assert sorted(quantizable_linears(Model())) == sorted(f"layers.{i}.{p}" for i in range(2) for p in PROJECTIONS)


def test_the_head_comes_where_it_is_asked_for():
    assert set(quantizable_linears(Model(), head=True)) - set(quantizable_linears(Model())) == {"head"}
    assert "head" not in quantizable_linears(Model(), exclude=["head"], head=True)
    assert "layers.0.mlp.gate" not in quantizable_linears(Model(), head=True)


def test_globs_exclude_layers():
    left = quantizable_linears(Model(), exclude=["layers.0.*", "*.down_proj"])
    assert sorted(left) == sorted(f"layers.1.{p}" for p in PROJECTIONS if "down" not in p)


def test_adapters_are_not_quantized():
    model = nn.ModuleDict({"q_proj": nn.ModuleDict({"base_layer": nn.Linear(4, 4), "lora_A": nn.Linear(4, 2)})})
    assert list(quantizable_linears(model)) == ["q_proj.base_layer"]


def test_fused_groups_are_those_of_the_engines():
    groups = fused_groups(quantizable_linears(Model()))
    assert groups["layers.1.self_attn.qkv_proj"] == [f"layers.1.self_attn.{x}_proj" for x in "qkv"]
    assert groups["layers.0.mlp.gate_up_proj"] == ["layers.0.mlp.gate_proj", "layers.0.mlp.up_proj"]
    assert groups["layers.0.mlp.down_proj"] == ["layers.0.mlp.down_proj"]
    assert fused_group("a.q_proj.base_layer") == fused_group("a.k_proj.base_layer") == "a.qkv_proj"
    assert fused_group("q_proj") == "qkv_proj"


class Marked(nn.Linear):
    pass


def marked(name, linear):
    new = Marked(linear.in_features, linear.out_features, linear.bias is not None)
    new.weight, new.bias = linear.weight, linear.bias
    return new


def test_a_swap_keeps_names_and_is_idempotent():
    model = Model()
    before = {name: id(p) for name, p in model.named_parameters()}
    first = swap_linears(model, marked)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert len(first.swapped) == 14
    assert sorted(first.skipped) == ["head", "layers.0.mlp.gate", "layers.1.mlp.gate"]
    modules = [id(module) for module in model.modules()]
    second = swap_linears(model, marked)
    assert not second.swapped
    assert second.present == first.swapped
    assert [id(module) for module in model.modules()] == modules
    assert "14 linear layers swapped" in str(second)


def test_a_shared_layer_is_swapped_once_in_both_places():
    model = nn.Module()
    model.a = nn.Linear(4, 4)
    model.b = model.a
    swap_linears(model, marked)
    assert model.a is model.b
    assert type(model.a) is Marked


def test_a_swap_that_matches_nothing_is_an_error():
    with pytest.raises(ConfigError, match=r"No linear layer.*17 linear layers, all excluded.*exclude"):
        swap_linears(Model(), marked, lambda name, module: False)
    with pytest.raises(ConfigError, match=r"a model without nn.Linear"):
        swap_linears(nn.Sequential(nn.ReLU()), marked)


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
    assert layer.weight.shape == (96, 256)
    assert list(layer.state_dict()) == ["bias"]


def test_a_quantized_linear_follows_its_newest_weight():
    format = formats.get("fp8_row")
    layer = QuantizedLinear(format, (32, 64))
    with pytest.raises(RuntimeError, match="no weight yet"):
        layer(torch.ones(1, 64))
    x = torch.randn(2, 64)
    outputs = []
    for seed in range(2):
        weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))
        q = format.quantize(weight)
        layer.load({"weight": q.codes, "weight_scale": q.scales})
        outputs.append(layer(x))
        assert torch.equal(outputs[-1], format.linear(x, q))
    assert not torch.equal(*outputs)


def test_the_operand_is_made_once_unless_told_otherwise():
    format = formats.get("int4_group", group_size=32)
    q = format.quantize(torch.randn(32, 64))
    cached, plain = QuantizedLinear(format, (32, 64)), QuantizedLinear(format, (32, 64), cache=False)
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


def test_a_network_of_quantized_linears_is_close_to_the_plain_one():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.SiLU(), nn.Linear(256, 128))
    x = torch.randn(64, 128)
    plain = model(x)
    format = formats.get("fp8_row")

    def build(name, linear):
        layer = QuantizedLinear.from_linear(linear, format)
        layer.set_weight(format.quantize(linear.weight))
        return layer

    report = swap_linears(model, build)
    assert report.swapped == ("0", "2")
    assert (model(x) - plain).norm() / plain.norm() < 0.06
    assert not swap_linears(model, build).swapped
