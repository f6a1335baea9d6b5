import copy
import weakref

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

from lit_qrl.network.linears import fused_groups
from lit_qrl.policy import CausalPolicy
from lit_qrl.precision import NVFP4LoRA, QATAligned
from lit_qrl.precision.deferred import DeferredWeights, deferred_folder, deferred_weights
from tests.families.configs import BY_TYPE, random_network
from tests.tiny_run import model_folder

SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1}


def deferred(**changes):
    config = Qwen2Config(**{**SIZES, **changes})
    return DeferredWeights(lambda: AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def memory(network):
    return sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in network.parameters()}.values())


def test_nothing_is_drawn_until_it_is_asked_for_and_what_was_stays():
    weights = deferred()
    count = len(list(weights.network.parameters()))
    assert memory(weights.network) == 4 * count
    layer = weights.network.model.layers[0].mlp.up_proj
    weights.fill(layer)
    assert memory(weights.network) == 4 * (count - 1) + layer.weight.nbytes
    assert layer.weight.std().item() == pytest.approx(0.02, rel=0.1)
    before = layer.weight.detach().clone()
    weights.fill(layer)
    weights.fill_all()
    assert torch.equal(layer.weight, before)


def test_a_filled_model_is_one_that_was_built_at_once():
    weights = deferred()
    weights.fill_all()
    plain = AutoModelForCausalLM.from_config(weights.network.config, dtype=torch.float32)
    filled = dict(weights.network.named_parameters())
    for name, parameter in plain.named_parameters():
        other = filled[name]
        assert (other.shape, other.dtype, other.requires_grad) == (parameter.shape, parameter.dtype, True)
        assert other.is_contiguous()
        if "norm" in name or "bias" in name:
            assert torch.equal(other, parameter)
        else:
            assert other.std().item() == pytest.approx(parameter.std().item(), rel=0.15)
    tokens = torch.tensor([[1, 2, 3]])
    weights.network.load_state_dict(plain.state_dict())
    assert torch.equal(weights.network(tokens).logits, plain(tokens).logits)


@pytest.mark.parametrize("first", ["embedding", "head"])
def test_tied_embeddings_stay_one(first):
    weights = deferred(tie_word_embeddings=True)
    network = weights.network
    weights.fill(network.lm_head if first == "head" else network.model.embed_tokens)
    weights.fill_all()
    assert network.lm_head.weight is network.model.embed_tokens.weight


def test_a_filled_weight_is_kept_by_its_module_alone():
    weights = deferred()
    mlp = weights.network.model.layers[0].mlp
    weights.fill(mlp.up_proj)
    seen = weakref.ref(mlp.up_proj.weight)
    mlp.up_proj = nn.Identity()
    assert seen() is None


def test_experts_that_a_plugin_swapped_before_they_were_drawn_are_the_familys():
    drawn, config = {}, random_network(BY_TYPE["qwen3_moe"]).config
    for swapped in (False, True):
        torch.manual_seed(0)
        weights = DeferredWeights(lambda: AutoModelForCausalLM.from_config(config, dtype=torch.float32))
        module = nn.Module()
        module.policy = nn.Module()
        module.policy.network = weights.network
        if swapped:
            QATAligned("int4_group").convert_module(module)
        weights.fill_all()
        drawn[swapped] = {name: value.detach().clone() for name, value in weights.network.named_parameters()}
    assert drawn[True].keys() == drawn[False].keys()
    assert all(torch.equal(value, drawn[False][name]) for name, value in drawn[True].items())
    assert 0.005 < drawn[True]["model.layers.0.mlp.experts.gate_up_proj"].std() < 0.05


@pytest.mark.parametrize("changes", [{"use_dora": True}, {"modules_to_save": ["norm"]}, {"init_lora_weights": "pissa"}])
def test_adapters_that_look_at_the_base_get_one(tmp_path, changes):
    lora = LoraConfig(r=4, target_modules=["q_proj"], **changes)
    policy = CausalPolicy(model_folder(tmp_path), lora=copy.deepcopy(lora), random_weights=True)
    with deferred_weights():
        policy.configure()
    assert policy.deferred is None
    weight = policy.network.model.layers[0].mlp.up_proj.weight
    assert weight.untyped_storage().nbytes() == weight.nbytes


def plain_folder(tmp_path, **changes):
    torch.manual_seed(3)
    config = Qwen2Config(**{**SIZES, "dtype": "float32", **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    folder = tmp_path / "plain"
    model.save_pretrained(folder, max_shard_size="20KB")
    return folder, model, lambda: AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_is_read_layer_by_layer(tmp_path, tied):
    folder, model, build = plain_folder(tmp_path, tie_word_embeddings=tied)
    weights = deferred_folder(folder, build)
    assert memory(weights.network) == 4 * len(list(model.parameters()))
    layer = weights.network.model.layers[0].mlp.up_proj
    weights.fill(layer)
    assert torch.equal(layer.weight, model.model.layers[0].mlp.up_proj.weight)
    weights.fill_all()
    filled = weights.network.state_dict()
    assert all(torch.equal(filled[name], value) for name, value in model.state_dict().items())
    assert (weights.network.lm_head.weight is weights.network.model.embed_tokens.weight) == tied


def test_what_transformers_must_read_is_left_to_it(tmp_path):
    folder, _, build = plain_folder(tmp_path, num_hidden_layers=1)
    config = Qwen2Config(**{**SIZES, "num_hidden_layers": 2})
    assert deferred_folder(folder, lambda: AutoModelForCausalLM.from_config(config)) is None  # weights are missing
    assert deferred_folder(tmp_path, build) is None  # no safetensors

    def with_buffer():
        network = build()
        network.register_buffer("stored", torch.zeros(2))
        return network

    assert deferred_folder(folder, with_buffer) is None
    shard = next(iter(sorted(folder.glob("*.safetensors"))))
    save_file(load_file(shard) | {"another": torch.zeros(2)}, shard, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    text = index.read_text().replace('"weight_map": {', f'"weight_map": {{"another": "{shard.name}",')
    index.write_text(text)
    assert deferred_folder(folder, build) is None


def full_precision_bytes(network):
    held = [m.weight for name, m in network.named_modules() if type(m) is nn.Linear and "lora_" not in name]
    return sum(w.untyped_storage().nbytes() for w in held if w.untyped_storage().nbytes() > 4)


@pytest.mark.parametrize("random", [False, True])
def test_a_base_is_packed_layer_by_layer(random, tmp_path, monkeypatch):
    """Of a folder into the codes of one that was read at once; of weights that are drawn, into finite ones."""
    folder, most, original = model_folder(tmp_path), [], NVFP4LoRA._place

    def place(self, network, name, linear, codes):
        most.append(full_precision_bytes(network))
        original(self, network, name, linear, codes)

    made = []
    for at_once in (False, True):
        lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
        policy, plugin = CausalPolicy(folder, lora=lora, random_weights=random), NVFP4LoRA()
        torch.manual_seed(0)
        if at_once:
            monkeypatch.undo()
            policy.configure()
            whole = full_precision_bytes(policy.network)
        else:
            monkeypatch.setattr(NVFP4LoRA, "_place", place)
            with plugin.module_init_context():
                policy.configure()
            assert policy.deferred is not None
            assert full_precision_bytes(policy.network) == 0
        plugin.configure_policy(policy)
        assert policy.deferred is None
        rest = {name: p for name, p in policy.network.named_parameters() if "lora_" not in name}
        made.append(({name: layer.weight for name, layer in plugin.packed(policy).items()}, rest))
    (first, rest), (second, others) = made
    assert first.keys() == second.keys()
    assert len(first) == len(most) == 14
    if random:
        assert all(bool(torch.isfinite(p).all()) for p in policy.parameters())
    else:
        assert all(torch.equal(p, others[key]) for key, p in rest.items())
        assert all(torch.equal(q.codes, second[name].codes) for name, q in first.items())
        assert all(torch.equal(q.scales.float(), second[name].scales.float()) for name, q in first.items())
    groups = fused_groups(first).values()
    group = max(sum(4 * first[name].shape[0] * first[name].shape[1] for name in names) for names in groups)
    assert max(most) == group  # one fused group, of the whole base
    assert group < whole / 4
