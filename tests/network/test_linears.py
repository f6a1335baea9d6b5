import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from lit_qrl.errors import ConfigError
from lit_qrl.network.experts import expert_weights
from lit_qrl.network.linears import (
    check_quantizable,
    computes_as_linear,
    fused_group,
    fused_groups,
    quantizable_layers,
    quantizable_linears,
    routers_of,
    swap_linears,
    transposed_layers,
)
from lit_qrl.network.structure import outline
from tests.families.configs import BY_TYPE
from tests.networks import build_network

PROJECTIONS = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]


@pytest.fixture
def model():
    return build_network(tie_word_embeddings=False)


def test_every_linear_but_the_head_and_what_globs_exclude_is_quantizable(model):
    every = set(quantizable_linears(model))
    assert every == {f"model.layers.{i}.{p}" for i in range(2) for p in PROJECTIONS}
    left = quantizable_linears(model, exclude=["model.layers.0.*", "*.down_proj"])
    assert sorted(left) == sorted(f"model.layers.1.{p}" for p in PROJECTIONS if "down" not in p)
    assert set(quantizable_linears(model, head=True)) - every == {"lm_head"}
    assert set(quantizable_linears(model, exclude=["lm_head"], head=True)) == every


def test_an_adapter_changes_no_name_and_is_not_quantized(model):
    own = quantizable_linears(model)
    plain = list(own)
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "up_proj"], modules_to_save=["down_proj"]))
    found = quantizable_linears(model)
    assert list(found) == plain
    copies = {name for name, layer in found.items() if layer is not own[name]}
    assert copies == {name for name in plain if "down_proj" in name}
    assert all(layer.weight.requires_grad == (name in copies) for name, layer in found.items())
    assert list(quantizable_linears(model, ["*.q_proj"])) == [name for name in plain if "q_proj" not in name]


def test_fused_groups_are_those_of_the_engines(model):
    groups, first = fused_groups(quantizable_linears(model)), "model.layers.0"
    assert groups[f"{first}.self_attn.qkv_proj"] == [f"{first}.self_attn.{x}_proj" for x in "qkv"]
    assert groups[f"{first}.mlp.gate_up_proj"] == [f"{first}.mlp.gate_proj", f"{first}.mlp.up_proj"]
    assert groups[f"{first}.mlp.down_proj"] == [f"{first}.mlp.down_proj"]
    assert fused_group("q_proj") == "qkv_proj"


class Marked(nn.Linear):
    is_swapped = True


def marked(name, linear):
    new = Marked(linear.in_features, linear.out_features, linear.bias is not None)
    new.weight, new.bias = linear.weight, linear.bias
    return new


def test_a_swap_keeps_names_and_is_idempotent(model):
    before = {name: id(p) for name, p in model.named_parameters()}
    first = swap_linears(model, marked)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert len(first) == 14
    modules = [id(module) for module in model.modules()]
    assert not swap_linears(model, marked)
    assert [id(module) for module in model.modules()] == modules


def test_a_shared_layer_is_swapped_once_in_both_places():
    model = nn.Module()
    model.a = nn.Linear(4, 4)
    model.b = model.a
    swap_linears(model, marked)
    assert model.a is model.b
    assert type(model.a) is Marked


def test_a_swap_that_matches_nothing_is_an_error(model):
    with pytest.raises(ConfigError, match=r"No linear layer.*exclude"):
        swap_linears(model, marked, ["*"])
    with pytest.raises(ConfigError, match=r"Given: Sequential"):
        swap_linears(nn.Sequential(nn.ReLU()), marked)


def test_image_parts_stay_plain():
    network = outline(BY_TYPE["gemma3"].config())
    names = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    left = [name for name in names if name not in quantizable_linears(network)]
    assert {name.split(".")[1] for name in left if name != "lm_head"} == {"vision_tower"}
    assert not expert_weights(network)


@pytest.mark.parametrize("kind", ["qwen3_moe", "llama4_text", "gpt_oss", "deepseek_v3", "qwen3_next"])
def test_experts_are_found_by_their_shape_and_routers_beside_them(kind):
    network = outline(BY_TYPE[kind].config())
    assert {name.rpartition(".")[2] for name in expert_weights(network)} == {"gate_up_proj", "down_proj"}
    assert not any(name.endswith(("router", "gate")) for name in quantizable_linears(network))
    check_quantizable(network, "nvfp4")
    layers, linears = quantizable_layers(network), quantizable_linears(network)
    numbers = sum(math.prod(shape) for name, shape in layers.items() if name not in linears)
    assert numbers == sum(parameter.numel() for parameter in expert_weights(network).values())
    assert set(quantizable_layers(network, ["*.experts"])) == set(linears)
    with pytest.raises(ConfigError, match=r"split the experts.*'\*.experts'"):
        check_quantizable(network, "nvfp4", ["*.experts.1.*"])


def test_experts_that_lie_in_an_unknown_way_are_refused_until_they_are_left_out():
    network = nn.ModuleDict({"up_proj": nn.Linear(2, 2), "experts": nn.Module()})
    network["experts"].weight = nn.Parameter(torch.zeros(4, 2, 2))
    with pytest.raises(ConfigError, match=r"does not apply to the experts.*experts.weight.*publisher.exclude"):
        check_quantizable(network, "nvfp4")
    check_quantizable(network, "nvfp4", ["experts"])
    check_quantizable(network, "nvfp4", ["experts.*"])


@pytest.mark.parametrize(
    ("kind", "layers"), [("qwen3_5_text", ["in_proj_qkv", "in_proj_z"]), ("lfm2", ["in_proj", "out_proj"])]
)
def test_a_layer_as_wide_as_a_convolution_is_no_router(kind, layers):
    network = outline(BY_TYPE[kind].config())
    assert not routers_of(network)
    found = [name for name in quantizable_linears(network) if ".conv." in name or ".linear_attn." in name]
    assert {name.rpartition(".")[2] for name in found} >= set(layers)


def test_routers_of_experts_in_a_list_and_in_a_module_of_their_own():
    class Router(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 3)

    experts = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(8, 3), "down": nn.Linear(3, 8)}) for _ in range(3)])
    parts = {"router": Router(), "experts": experts, "shared": nn.Linear(8, 8), "shared_gate": nn.Linear(8, 1)}
    network = nn.ModuleDict({"mlp": nn.ModuleDict(parts), "head": nn.Linear(8, 3)})
    assert routers_of(network) == {parts["router"].layer, parts["shared_gate"]}
    layers = nn.ModuleList([nn.ModuleDict({"mlp": nn.ModuleDict({"up": nn.Linear(8, 8)})}) for _ in range(3)])
    assert not routers_of(nn.ModuleDict({"layers": layers, "into": nn.Linear(8, 3)}))


def test_transposed_layers_are_refused():
    network = outline(BY_TYPE["gpt2"].config())
    assert len(transposed_layers(network)) == 8
    with pytest.raises(ConfigError, match=r"Conv1D.*Given: GPT2LMHeadModel with transformer\.h\.0\.attn\.c_attn"):
        check_quantizable(network, "nvfp4")
    assert transposed_layers(outline(BY_TYPE["llama"].config())) == []


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Written(nn.Linear):
    def forward(self, x):
        return x @ self.weight.T + self.bias


class Sized(Written):
    def __init__(self, config):
        super().__init__(*config)


def test_a_layer_that_computes_something_of_its_own_is_refused():
    state = torch.random.get_rng_state()
    assert [computes_as_linear(kind) for kind in (Written, Doubled, Sized)] == [True, False, False]
    assert torch.equal(torch.random.get_rng_state(), state)
    network = outline(BY_TYPE["llama"].config())
    network.model.layers[1].mlp.up_proj = Doubled(128, 256)
    name = "model.layers.1.mlp.up_proj"
    with pytest.raises(ConfigError, match=rf"Doubled of this model computes something else.*Given: {name}.*exclude"):
        check_quantizable(network, "fp8_row")
    check_quantizable(network, "fp8_row", ["*.1.mlp.up_proj"])


def test_a_familys_own_class_that_computes_the_same_is_swapped():
    network = outline(BY_TYPE["falcon"].config())
    swapped = swap_linears(network, lambda name, linear: Marked(linear.in_features, linear.out_features, device="meta"))
    assert set(swapped) == set(quantizable_linears(network))
    assert len(swapped) == 8
