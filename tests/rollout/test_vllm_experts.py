"""Experts in vLLM: every matrix has a receipt, along vLLM's reload and along learned routes, and faults are named."""

import pytest
import torch
from peft import LoraConfig
from transformers import MixtralConfig, Qwen3MoeConfig

from lit_qrl.network.experts import expert_stacks
from lit_qrl.publish.probe import Probe, learner_scores
from lit_qrl.receipts.ledger import PublishError
from tests.vllm_engines import VOCABULARY, disagreement, named, optimizer_step, publish, sampler_format, tiny_network

pytestmark = pytest.mark.vllm

EXPERTS = 4
FAMILIES = {
    "qwen3_moe": (
        Qwen3MoeConfig,
        {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True},
    ),
    "mixtral": (MixtralConfig, {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "intermediate_size": 96}),
}


def mixture(family="qwen3_moe", **changes):
    config, sizes = FAMILIES[family]
    return tiny_network(config, **{**sizes, **changes})


def wired(changed):
    """A wire that sends `changed[name]` in place of a tensor, and nothing where that is None."""

    def wire(stream):
        for name, tensor in stream:
            sent = changed.get(name, tensor)
            if sent is not None:
                yield name, sent

    return wire


@pytest.mark.parametrize("family", FAMILIES)
def test_every_expert_is_verified_and_faults_are_named(family, built):
    network = mixture(family)
    engine = built(network)
    stack = expert_stacks(network)["model.layers.1.mlp.experts"]
    gate, up, down = (f"{stack.name}.{{}}.{leaf}.weight" for leaves in stack.parts.values() for leaf in leaves)
    faults, sent, report = publish(network, engine, None, 0)
    assert faults == []
    assert report.received.unread == []
    experts = {f"{layer}.weight" for one in expert_stacks(network).values() for layer in one.layers()}
    assert experts < sent.receipts().keys()
    assert {report.layers[name] for name in experts} == {"fp32"}
    previous = sent.receipts()

    for reload in (False, True):  # along learned routes, and through vLLM's reload
        version = 10 * (1 + reload)
        if reload:
            engine.live.routes, engine.live.learns_routes = None, False
        assert (engine.live.routes is None) == reload
        optimizer_step(network, seed=version)
        now = {name: tensor.detach().clone() for name, tensor in engine.arranged(network.named_parameters())}
        halves = {gate.format(0): now[up.format(0)], up.format(0): now[gate.format(0)]}
        faults = publish(network, engine, None, version + 2, previous, wired(halves))[0]
        told = {(kind, name) for kind, name in named(faults) if kind != "read_back"}  # by a CPU that packs no experts
        assert told == {("swapped", name) for name in halves}
        for missing in (down.format(3), gate.format(3)):
            with pytest.raises(PublishError, match=missing.split("experts.")[1].removesuffix(".weight")):
                publish(network, engine, None, version + 3, previous, wired({missing: None}))
        faults, sent, report = publish(network, engine, None, version + 4)
        assert faults == []
        assert report.received.unread == []
        assert disagreement(network, engine) < 1e-4
        previous = sent.receipts()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_experts_of_other_widths_are_verified(dtype, built):
    network = mixture(moe_intermediate_size=72)  # the CPU's kernel multiplies 96 rows of each
    engine = built(network, dtype=dtype)
    for version in range(3):
        faults, _, report = publish(network, engine, None, version)
        assert faults == []
        assert report.received.unread == []
        optimizer_step(network, seed=version)


def test_few_bits_beside_plain_experts(built):
    format, network = sampler_format("int4_group"), mixture(dtype=torch.bfloat16)
    engine = built(network, format, spec={"exclude": ("*.experts",)})
    probe = Probe(VOCABULARY)
    for version in range(2):
        faults, _, report = publish(network, engine, format, version)
        assert faults == []
        assert report.received.unread == []
        kinds = {name: kind for name, kind in report.layers.items() if "layers.0" in name and "norm" not in name}
        plain = {name for name in kinds if "experts" in name or "gate.weight" in name}
        assert {kinds[name] for name in plain} == {"bf16"}
        assert {kinds[name] for name in kinds.keys() - plain} == {"int4_group"}
        scores = learner_scores(network, probe.tokens, format, exclude=("*.experts",))
        assert probe.compare(engine.score(probe.tokens), scores).passed
        optimizer_step(network, seed=version, learning_rate=0.01)


def test_experts_beside_an_adapter_of_attention_have_kernels(built):
    network = mixture()
    engine = built(network, lora=LoraConfig(r=4, target_modules=["q_proj"]), max_lora_rank=8)
    assert publish(network, engine, None, 0)[0] == []
    assert disagreement(network, engine) < 1e-5


def test_a_layer_is_processed_before_the_next_comes_though_vllm_waits_for_more(monkeypatch, built):
    """Some methods have parameters for experts that no checkpoint of ours fills; vLLM would hold what all got."""
    from vllm.model_executor.model_loader.reload import layerwise

    network, story = mixture(), []
    engine = built(network)
    size, process = layerwise.get_layer_size, layerwise._layerwise_process
    monkeypatch.setattr(layerwise, "get_layer_size", lambda layer: size(layer) + hasattr(layer, "w13_weight"))

    def noted(layer, info):
        story.append("processed" if hasattr(layer, "w13_weight") else "other")
        process(layer, info)

    monkeypatch.setattr(layerwise, "_layerwise_process", noted)

    def told(stream):
        for name, tensor in stream:
            story.append(name)
            yield name, tensor

    faults, _, report = publish(network, engine, None, 0, wire=told)
    assert faults == []
    assert report.received.unread == []
    first, second = (index for index, one in enumerate(story) if one == "processed")
    later = next(index for index, name in enumerate(story) if name.startswith("model.layers.1"))
    assert "layers.0.mlp.experts" in story[first - 2]
    assert first < later < second
    assert "layers.1.mlp.experts" in story[second - 2]
    assert disagreement(network, engine) < 1e-4
