import pytest
import torch
from transformers import CohereConfig, LlamaConfig

from lit_qrl import formats
from lit_qrl.network.quantized_linear import QuantizedLinear
from lit_qrl.rollout.embedded.loading import Modules, skeleton
from tests.networks import build_network

CPU = torch.device("cpu")


def test_a_skeleton_has_buffers_and_no_weights():
    network = build_network()
    built = skeleton(network, CPU)
    assert type(built) is type(network)
    assert all(parameter.is_meta and not parameter.requires_grad for parameter in built.parameters())
    assert torch.equal(built.model.rotary_emb.inv_freq, network.model.rotary_emb.inv_freq)
    assert built.config is not network.config
    assert not built.training


def test_a_sharded_learners_sampler_is_of_the_plain_class():
    network = build_network()
    plain = type(network)
    network.__class__ = type(f"FSDP{plain.__name__}", (plain,), {})
    assert type(skeleton(network, CPU)) is plain


@pytest.mark.parametrize(
    ("changes", "tied"), [({}, True), ({"tie_word_embeddings": False}, False)], ids=["tied", "untied"]
)
def test_a_tied_weight_counts_once_and_reaches_both_places(changes, tied):
    modules = Modules(skeleton(build_network(LlamaConfig, **changes), CPU), CPU)
    assert ("lm_head.weight" in modules.expected) is not tied
    embedding = torch.randn(modules.shapes["model.embed_tokens.weight"])
    modules.set_plain("model.embed_tokens.weight", embedding)
    head = modules.network.lm_head.weight
    assert (head.data_ptr() == embedding.data_ptr()) is tied


def test_a_layer_changes_between_plain_and_quantized_and_keeps_its_bias():
    modules = Modules(skeleton(build_network(LlamaConfig, attention_bias=True), CPU), CPU)
    name = "model.layers.0.self_attn.q_proj"
    bias, weight = torch.randn(modules.shapes[f"{name}.bias"]), torch.randn(modules.shapes[f"{name}.weight"])
    modules.set_plain(f"{name}.bias", bias)
    format = formats.get("fp8_row")
    exported = dict(format.export(format.quantize(weight), name))
    suffixes = {key.removeprefix(f"{name}."): tensor for key, tensor in exported.items()}
    modules.set_quantized(name, suffixes, format, cache=True)
    layer = modules.network.get_submodule(name)
    assert isinstance(layer, QuantizedLinear)
    assert torch.equal(layer.bias, bias)
    assert torch.equal(modules.held(f"{name}.weight").view(torch.uint8), exported[f"{name}.weight"].view(torch.uint8))
    assert modules.held(f"{name}.nothing") is None
    modules.set_plain(f"{name}.weight", weight)
    layer = modules.network.get_submodule(name)
    assert type(layer) is torch.nn.Linear
    x = torch.randn(2, weight.shape[1])
    torch.testing.assert_close(layer(x), x @ weight.T + bias)


def test_names_are_the_checkpoints(tmp_path):
    network = build_network(CohereConfig)
    network.save_pretrained(tmp_path)
    from safetensors import safe_open

    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == Modules(skeleton(network, CPU), CPU).expected
