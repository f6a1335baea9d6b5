import pytest
import torch
from peft import IA3Config, LoHaConfig, LoraConfig, VeraConfig, get_peft_model
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM

from lit_qrl.network.experts import stored_names
from lit_qrl.network.names import (
    base_of,
    checkpoint_modules,
    checkpoint_name,
    copy_in_use,
    is_adapted,
    is_adapter,
    is_saved_with_adapter,
    kept_in_fp32,
    put_layer,
)
from lit_qrl.network.structure import outline
from tests.families.configs import BY_TYPE, random_network
from tests.networks import build_network

TARGETS = ["q_proj", "down_proj"]
CONFIGS = [
    LoraConfig(r=2, target_modules=TARGETS, modules_to_save=["norm", "up_proj"]),
    LoraConfig(r=2, target_modules=TARGETS, use_dora=True),
    LoHaConfig(r=2, target_modules=TARGETS),
    IA3Config(target_modules=TARGETS, feedforward_modules=["down_proj"]),
    VeraConfig(r=2, target_modules=["q_proj"]),
]


def kind(config):
    return type(config).__name__


@pytest.mark.parametrize("config", CONFIGS, ids=kind)
def test_the_modules_are_those_of_the_plain_model(config):
    plain, network = build_network(), build_network()
    get_peft_model(network, config)
    found = list(checkpoint_modules(network))
    assert [name for name, _ in found] == [name for name, _ in plain.named_modules()]
    assert [type(base_of(module)) for _, module in found] == [type(module) for module in plain.modules()]
    adapted = {name for name, module in found if is_adapted(module)}
    assert adapted == {name for name, _ in found if name.endswith(tuple(config.target_modules))}


@pytest.mark.parametrize("config", CONFIGS, ids=kind)
def test_a_parameter_is_the_models_or_the_adapters(config):
    plain, network = dict(build_network().named_parameters()), build_network()
    get_peft_model(network, config)
    frozen = [name for name, parameter in network.named_parameters() if not parameter.requires_grad]
    own = [name for name in frozen if not is_adapter(name) and "original_module" not in name]
    copies = [n for n, p in network.named_parameters() if p.requires_grad and not is_adapter(n)]
    assert {checkpoint_name(name) for name in [*own, *copies]} == set(plain)
    trained = [name for name, parameter in network.named_parameters() if parameter.requires_grad]
    assert trained
    assert all(is_saved_with_adapter(name) for name in trained)


def test_a_copy_that_peft_trains_is_used_until_the_adapter_is_switched_off():
    network = build_network()
    adapted = get_peft_model(network, CONFIGS[0])
    wrapper = network.model.norm
    assert copy_in_use(wrapper) is wrapper.modules_to_save["default"]
    with adapted.disable_adapter():
        assert copy_in_use(wrapper) is wrapper.original_module
    assert copy_in_use(network.model.embed_tokens) is network.model.embed_tokens


def test_a_shared_module_comes_once():
    model = nn.Module()
    model.a = nn.Linear(2, 2)
    model.b = model.a
    assert [name for name, _ in checkpoint_modules(model)] == ["", "a"]


def test_a_layer_is_put_inside_its_adapter():
    network = build_network()
    get_peft_model(network, CONFIGS[0])
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"):
        outer = network.get_submodule(name)
        new = nn.Linear(base_of(outer).in_features, base_of(outer).out_features, bias=False)
        put_layer(network, name, new)
        assert base_of(network.get_submodule(name)) is new
        assert is_adapted(network.get_submodule(name)) == is_adapted(outer)
    assert torch.isfinite(network(torch.tensor([[3, 4]])).logits).all()


@pytest.mark.parametrize("model_type", ["deepseek_v3", "llama"])
def test_what_a_model_keeps_in_fp32_is_what_the_library_loads_so(model_type, tmp_path):
    random_network(BY_TYPE[model_type]).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    wide = {name for name, tensor in loaded.state_dict().items() if tensor.dtype == torch.float32}
    assert kept_in_fp32(loaded) == wide
    assert bool(wide) == (model_type == "deepseek_v3")


@pytest.mark.parametrize("model_type", ["gpt_neox", "gemma3", "llama"])
def test_stored_names_are_those_that_the_library_writes(model_type, tmp_path):
    network = random_network(BY_TYPE[model_type])
    network.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        for name, stored in stored_names(outline(network.config), file.keys()).items():
            assert torch.equal(network.state_dict()[name], file.get_tensor(stored)), name
        names = list(file.keys())
    assert stored_names(network, names).keys() <= network.state_dict().keys()
    assert (model_type == "llama") == all(name in network.state_dict() for name in names)


def test_experts_that_are_stored_one_by_one_have_names_of_their_own():
    stored = "model.layers.0.block_sparse_moe.experts.1.w1.weight_scale"
    named = "model.layers.0.mlp.experts.1.w1.weight_scale"
    assert stored_names(outline(BY_TYPE["mixtral"].config()), [stored]) == {named: stored}
