from types import SimpleNamespace

import pytest
import torch
from transformers import CohereConfig, LlamaConfig

from lit_qrl import formats
from lit_qrl.network.adapters import merged_weights
from lit_qrl.network.quantized_linear import QuantizedLinear
from lit_qrl.precision.source import WeightSource, unchanged
from lit_qrl.receipts.ledger import RefusedError, SentLedger, compare
from lit_qrl.rollout.embedded.loading import Loader, Modules, skeleton
from tests.families.configs import BY_TYPE, random_network
from tests.networks import build_network
from tests.stacked_experts import rounded

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


def stream_of(network, format):
    source = WeightSource(SimpleNamespace(network=network, named_weights=lambda: merged_weights(network)), format)
    return source.whole(unchanged, None)


def loaded(network, format, stream, version=0, modules=None):
    modules = modules or Modules(skeleton(network, CPU), CPU)
    loader = Loader(modules, format, version, None, (), share=False, cache=True)
    loader.load(stream)
    return modules, loader


@pytest.mark.parametrize("name", ["nvfp4", "int4_group"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "gpt_oss", "llama4_text"])
def test_experts_compute_as_their_codes_stand_for(kind, name):
    network, format, ids = random_network(BY_TYPE[kind]), formats.get(name), torch.arange(3, 14)[None]
    modules, _ = loaded(network, format, stream_of(network, format))
    with torch.no_grad():
        got, expected = (one(ids).logits.log_softmax(-1) for one in (modules.network, rounded(kind, network, format)))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_experts_change_between_formats_and_plain(kind):
    network, ids = random_network(BY_TYPE[kind]), torch.arange(3, 14)[None]
    modules, _ = loaded(network, None, merged_weights(network))
    for version, name in enumerate(("fp8_row", None, "nvfp4", "int4_group", None), 1):
        format = None if name is None else formats.get(name)
        loaded(network, format, stream_of(network, format), version, modules)
        with torch.no_grad():
            got = modules.network(ids).logits
            if name in ("nvfp4", "int4_group"):
                expected = rounded(kind, network, format)(ids).logits
            else:
                expected = network(ids).logits
        assert torch.allclose(got, expected, atol=1e-4) is (name != "fp8_row")


def faulty(stream, fault):
    held = {}
    for key, tensor in stream:
        if "experts.2.down_proj" in key and fault == "missing":
            continue
        held[key] = tensor
    if fault == "swapped":
        for key in list(held):
            if "experts.1.down_proj" in key and ".layers.0." in key:
                other = key.replace("experts.1", "experts.3")
                held[key], held[other] = held[other], held[key]
    return held.items()


def test_an_expert_that_is_missing_is_named():
    network, format = random_network(BY_TYPE["qwen3_moe"]), formats.get("fp8_row")
    with pytest.raises(RefusedError, match=r"2 of 45 tensors are missing.*layers.0.mlp.experts.2.down_proj.weight"):
        loaded(network, format, faulty(stream_of(network, format), "missing"))


@pytest.mark.parametrize("fault", ["swapped", "stale"])
def test_a_wrong_expert_is_named(fault):
    network, format = random_network(BY_TYPE["qwen3_moe"]), formats.get("nvfp4")
    first = SentLedger(0, format)
    modules, _ = loaded(network, format, first.watch(stream_of(network, format)))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(1.1)
    sent = SentLedger(1, format)
    stream = faulty(sent.watch(stream_of(network, format)), fault)
    layer = "model.layers.0.mlp.experts.1.down_proj"
    if fault == "stale":
        kept = modules.network.get_submodule(layer).weight
        put_back = modules.set_quantized

        def frozen(name, *rest):
            put_back(name, *rest)
            if name == layer:
                modules.network.get_submodule(layer).set_weight(kept)

        modules.set_quantized = frozen
    _, loader = loaded(network, format, stream, 1, modules)
    faults = compare(sent, loader.received, first.receipts())
    assert {one.kind for one in faults} <= {fault, "different"}
    assert any(one.kind == fault and one.name.startswith(layer) for one in faults)
    other = "model.layers.0.mlp.experts.3.down_proj"
    assert {one.name.rpartition(".")[0] for one in faults} == ({layer, other} if fault == "swapped" else {layer})
