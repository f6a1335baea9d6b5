import pytest
import torch
from peft import LoHaConfig, LoraConfig, get_peft_model
from transformers import Qwen2Config

from lit_qrl import formats
from lit_qrl.errors import ConfigError
from lit_qrl.network.adapters import (
    base_weights,
    check_fits,
    check_separable,
    lost_in_merge,
    merged_tensors,
    merged_weights,
    starts_from_base,
    with_adapter,
)
from lit_qrl.network.linears import quantizable_linears
from lit_qrl.network.names import base_of, checkpoint_modules, is_adapted, put_layer
from lit_qrl.network.quantized_linear import QuantizedLinear
from lit_qrl.network.structure import outline
from tests.families.configs import BY_TYPE, random_network
from tests.networks import build_network

UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj"


def lora(**options):
    options = {"target_modules": ["up_proj", "q_proj"], **options}
    return LoraConfig(r=2, lora_alpha=4, init_lora_weights=False, **options)


def packed(network, name):
    """Give a layer int8 codes in place of its weight, and return the weight that they stand for."""
    format, layer = formats.get("int8_channel"), base_of(network.get_submodule(name))
    q = format.quantize(layer.weight.detach())
    quantized = QuantizedLinear.from_linear(layer, format)
    quantized.set_weight(q)
    put_layer(network, name, quantized)
    return format.dequantize(q)


def test_persistent_buffers_are_weights_and_others_are_not():
    network = build_network()
    network.model.register_buffer("kept", torch.ones(2))
    network.model.register_buffer("derived", torch.ones(2), persistent=False)
    names = {name for name, _ in merged_weights(network)}
    assert "model.kept" in names
    assert "model.derived" not in names


@pytest.mark.parametrize(
    ("options", "reads"),
    [
        ({}, False),
        ({"init_lora_weights": False}, False),
        ({"init_lora_weights": "gaussian"}, False),
        ({"init_lora_weights": "olora"}, True),
        ({"use_dora": True}, True),
    ],
)
def test_an_adapter_that_starts_from_the_base_is_known(options, reads):
    assert starts_from_base(LoraConfig(**options)) == reads
    networks = [build_network(seed=seed) for seed in (0, 1)]
    made = []
    for network in networks:
        torch.manual_seed(0)
        get_peft_model(network, LoraConfig(r=2, target_modules=["up_proj"], **options))
        made.append([p.clone() for name, p in network.named_parameters() if "lora_" in name])
    assert made[0]
    assert any(not torch.equal(one, other) for one, other in zip(*made, strict=True)) == reads


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (lora(), torch.float32),
        (lora(), torch.bfloat16),
        (LoHaConfig(r=2, target_modules=["up_proj", "q_proj"], init_weights=False), torch.float32),
    ],
)
def test_merged_weights_are_those_of_a_model_that_peft_merged(config, dtype, monkeypatch):
    network = build_network(Qwen2Config, dtype=dtype)  # with biases
    adapted = get_peft_model(network, config)
    before = {name: tensor.clone() for name, tensor in adapted.state_dict().items()}
    with monkeypatch.context() as patch:
        if isinstance(config, LoraConfig):
            patch.setattr(torch, "isfinite", lambda *_: pytest.fail("the host would wait"))
        merged = {name: tensor.clone() for name, tensor in merged_weights(network)}
    assert all(torch.equal(before[name], tensor) for name, tensor in adapted.state_dict().items())
    expected = dict(adapted.merge_and_unload(safe_merge=True).named_parameters())
    assert list(merged) == list(expected)
    assert all(torch.equal(merged[name], expected[name]) for name in expected)
    assert not torch.equal(merged[f"{UP}.weight"], before[f"base_model.model.{UP}.base_layer.weight"])


def test_the_trained_copy_of_a_linear_layer_takes_its_name():
    network = build_network()
    with_adapter(network, lora(modules_to_save=["down_proj"]), "it")
    copy = network.get_submodule(DOWN).modules_to_save["default"]
    with torch.no_grad():
        copy.weight.add_(1)
    for weights in (dict(merged_weights(network)), dict(base_weights(network))):
        assert list(weights) == list(dict(build_network().named_parameters()))
        assert torch.equal(weights[f"{DOWN}.weight"], copy.weight)


def test_an_adapter_is_merged_into_what_the_codes_of_a_packed_base_stand_for():
    network = build_network()
    with_adapter(network, lora(), "it")
    held = packed(network, UP)
    layer = network.get_submodule(UP)
    a, b = layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double()
    expected = (held.double() + 2 * b @ a).float()
    torch.testing.assert_close(merged_tensors(layer)["weight"], expected)
    weights = dict(merged_weights(network, torch.bfloat16))
    assert weights[f"{UP}.weight"].dtype == torch.bfloat16
    assert weights["model.layers.1.mlp.up_proj.weight"].dtype == torch.float32  # plain: merged in its own dtype
    torch.testing.assert_close(weights[f"{UP}.weight"].float(), expected, atol=1e-1, rtol=1e-2)
    assert torch.equal(dict(base_weights(network))[f"{UP}.weight"], held)
    plain = packed(network, DOWN)  # a layer without an adapter
    name = f"{DOWN}.weight"
    assert torch.equal(dict(merged_weights(network))[name], plain)
    assert dict(merged_weights(network, torch.bfloat16))[name].dtype == torch.bfloat16
    empty = dict(base_weights(network, multiply_out=False))
    assert empty[name].numel() == 0
    assert list(empty) == list(dict(build_network().named_parameters()))


def test_an_adapter_that_does_not_fit_names_the_layers():
    with pytest.raises(ConfigError, match=r"does not fit it.*down_proj.*all-linear"):
        with_adapter(build_network(), lora(target_modules=["nowhere"]), "it")


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "deepseek_v3", "llama4_text", "gpt_oss"])
def test_all_linear_adapts_linear_layers_and_leaves_experts_and_routers(kind):
    lora = LoraConfig(r=2, target_modules="all-linear")
    check_fits(outline(BY_TYPE[kind].config()), lora, "a model")
    assert lora.target_modules == "all-linear"  # the user's own is left alone
    network = random_network(BY_TYPE[kind])
    expected = set(quantizable_linears(network))
    with_adapter(network, lora, "a model")
    assert {name for name, module in checkpoint_modules(network) if is_adapted(module)} == expected
    assert expected
    for router in ("gate.weight", "router.weight"):
        wanted = LoraConfig(r=2, target_modules=["o_proj"], target_parameters=[router])
        network = random_network(BY_TYPE[kind])
        if any(name.endswith(router) for name, _ in network.named_parameters()):
            with pytest.raises(ConfigError, match=r"than linear layers and experts.*o_proj.*target_modules"):
                with_adapter(network, wanted, "it")


def test_rows_of_an_embedding_that_are_trained_are_merged_under_the_models_own_name():
    plain, network = build_network(tie_word_embeddings=False), build_network(tie_word_embeddings=False)
    get_peft_model(network, LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[3, 5]))
    rows = network.get_input_embeddings().token_adapter.trainable_tokens_delta["default"]
    with torch.no_grad():
        rows.add_(1.0)
    merged, before = dict(merged_weights(network)), dict(merged_weights(plain))
    assert list(merged) == list(before)
    name = "model.embed_tokens.weight"
    changed = (merged[name] != before[name]).any(dim=1).nonzero()[:, 0].tolist()
    assert changed == [3, 5]
    assert torch.equal(network.get_input_embeddings().token_adapter.base_layer.weight, before[name])


def test_what_a_merge_loses_is_what_rounding_takes_from_the_update():
    torch.manual_seed(0)
    network = get_peft_model(build_network().to(torch.bfloat16), lora()).base_model.model
    module = network.get_submodule(UP)
    base, update = module.base_layer.weight.detach().double(), module.get_delta_weight("default").detach().double()
    alone = torch.nn.ModuleDict({"layer": module})
    wanted = ((base + update).bfloat16().double() - base - update).norm() / update.norm()
    assert float(lost_in_merge(alone)) == pytest.approx(float(wanted), rel=1e-3)
    assert 0 < wanted < 1
    module.lora_B["default"].weight.data.mul_(1e-3)
    assert float(lost_in_merge(alone)) > float(wanted)  # of a small update more is lost
    format = formats.get("int8_channel")

    def rounded(weight):
        return format.dequantize(format.quantize(weight))

    assert float(lost_in_merge(alone, rounded)) > float(lost_in_merge(alone))
    assert float(lost_in_merge(alone, lambda weight: weight)) == pytest.approx(0, abs=1e-2)
    module.lora_B["default"].weight.data.zero_()
    assert float(lost_in_merge(alone)) == 0
    assert float(lost_in_merge(network)) > 0  # of the other layers
    assert float(lost_in_merge(build_network())) == 0


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "deepseek_v3", "llama4_text", "gpt_oss"])
def test_an_adapter_of_experts_is_merged_matrix_by_matrix(kind):
    torch.manual_seed(0)
    network = random_network(BY_TYPE[kind]).eval()
    own = {name: weight.clone() for name, weight in network.named_parameters()}
    config = lora(target_modules=["o_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    adapted = with_adapter(network, config, "it").eval()
    tokens = torch.arange(12).view(2, 6)
    expected = adapted(input_ids=tokens).logits
    merged = {name: weight.clone() for name, weight in merged_weights(network)}
    changed = {name for name, weight in own.items() if not weight.equal(merged[name])}
    assert {name.rpartition(".")[2] for name in changed if "experts" in name} == {"gate_up_proj", "down_proj"}
    plain = random_network(BY_TYPE[kind]).eval()
    plain.load_state_dict(merged, strict=False)
    torch.testing.assert_close(plain(input_ids=tokens).logits, expected)
    assert adapted(input_ids=tokens).logits.equal(expected)  # the learner's own weights are as they were
    with pytest.raises(ConfigError, match=r"target_parameters cannot be published apart.*lora to merged"):
        check_separable(config)
