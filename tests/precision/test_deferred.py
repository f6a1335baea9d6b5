import copy
import weakref

import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

from lit_qrl.precision import NVFP4LoRA
from lit_qrl.precision.deferred import DeferredWeights, deferred_weights, weights_are_deferred
from lit_qrl.precision.lora4bit import PackedLinear
from tests.run import fit, model_folder

SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1}


def deferred(**changes):
    config = Qwen2Config(**{**SIZES, **changes})
    return DeferredWeights(lambda: AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def memory(network):
    return sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in network.parameters()}.values())


def test_nothing_is_drawn_until_it_is_asked_for():
    weights = deferred()
    count = len(list(weights.network.parameters()))
    assert memory(weights.network) == 4 * count
    layer = weights.network.model.layers[0].mlp.up_proj
    weights.fill(layer)
    assert memory(weights.network) == 4 * (count - 1) + layer.weight.nbytes
    assert layer.weight.std().item() == pytest.approx(0.02, rel=0.1)


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


def test_what_was_filled_stays():
    weights = deferred()
    layer = weights.network.model.layers[1].self_attn.q_proj
    weights.fill(layer)
    before = layer.weight.detach().clone()
    weights.fill(layer)
    weights.fill_all()
    assert torch.equal(layer.weight, before)


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


def test_the_context_ends():
    def fails():
        with deferred_weights():
            assert weights_are_deferred()
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert not weights_are_deferred()


def one_by_one(monkeypatch):
    """Watch how many plain weights exist while a base is packed."""
    most, original = [], NVFP4LoRA._pack

    def pack(self, network, name, linear, shared):
        whole = [m for m in network.modules() if type(m) is nn.Linear and m.weight.untyped_storage().nbytes() > 4]
        most.append(sum(m is not linear and not m.weight.requires_grad for m in whole))
        original(self, network, name, linear, shared)

    monkeypatch.setattr(NVFP4LoRA, "_pack", pack)
    return most


def test_random_weights_are_packed_layer_by_layer(tmp_path, monkeypatch):
    most = one_by_one(monkeypatch)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    _, module, _ = fit(
        tmp_path,
        format="auto",
        policy={"lora": lora, "random_weights": True},
        trainer={"plugins": [NVFP4LoRA()], "max_epochs": 1},
    )
    assert module.policy.deferred is None
    packed = [part for part in module.policy.network.modules() if isinstance(part, PackedLinear)]
    assert len(packed) == len(most) == 14
    assert max(most) <= 2  # q beside k and v, which share its scale
    assert all(bool(torch.isfinite(p).all()) for p in module.policy.parameters())


@pytest.mark.parametrize("changes", [{"use_dora": True}, {"modules_to_save": ["norm"]}, {"init_lora_weights": "pissa"}])
def test_adapters_that_look_at_the_base_get_one(tmp_path, changes):
    from lit_qrl.policy import CausalPolicy

    lora = LoraConfig(r=4, target_modules=["q_proj"], **changes)
    policy = CausalPolicy(model_folder(tmp_path), lora=copy.deepcopy(lora), random_weights=True)
    with deferred_weights():
        policy.configure()
    assert policy.deferred is None
    weight = policy.network.model.layers[0].mlp.up_proj.weight
    assert weight.untyped_storage().nbytes() == weight.nbytes
