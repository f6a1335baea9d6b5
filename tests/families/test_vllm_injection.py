"""Through vLLM: a part that stayed behind or was exchanged between two publishes one optimizer step apart is named."""

import pytest
import torch

from lit_qrl.errors import ConfigError
from lit_qrl.network.adapters import merged_weights
from lit_qrl.receipts.ledger import PublishError
from lit_qrl.rollout.vllm import derived, models
from tests.families.configs import BY_TYPE, FAMILIES
from tests.families.page import kept
from tests.families.vllm_cells import eager_network, publish, start
from tests.vllm_engines import LEARNING_RATE, sampler_format

pytestmark = pytest.mark.vllm

KNOWN = [pytest.param(family, id=family.model_type) for family in FAMILIES if family.vllm]


def check_refusal(family, error):
    """A family that docs/models.md says to work is refused for want of a package, or in fp32 where bf16 alone works."""
    said = kept(family).get("vllm", {}).get("publish/auto", {}).get("state")
    half = "linear_key_head_dim" in family.options and "in bf16 alone" in str(error)
    assert said != "works" or half or "cannot load it here" in str(error)


@torch.no_grad()
def step(network, seed):
    """What one optimizer step changes: every number by the learning rate."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in dict.fromkeys((*network.parameters(), *network.buffers())):
        if tensor.is_floating_point():
            tensor.add_(LEARNING_RATE * (2.0 * torch.randint(2, tensor.shape, generator=generator) - 1))


def faults_of(network, engine, version, previous, wire=lambda stream: stream):
    try:
        return {(fault.kind, fault.name) for fault in publish(network, engine, version, previous, wire)[0]}
    except PublishError as error:
        return {(fault.kind, fault.name) for fault in error.faults}


def one_of_each(names):
    """The last tensor of each kind: the names of its layers aside."""
    return set({name.rpartition("layers.")[2].partition(".")[2] or name: name for name in names}.values())


@pytest.mark.parametrize("family", KNOWN)
def test_every_kind_of_tensor_is_named_when_it_stays_behind(family, monkeypatch):
    network, latent = eager_network(family, 0), "kv_lora_rank" in family.options
    try:
        engine = start(network, None)
    except ConfigError as error:
        check_refusal(family, error)
        return
    try:
        try:
            faults, sent, report = publish(network, engine, 0)
        except ConfigError as error:  # vLLM builds no engine of it
            check_refusal(family, error)
            return
        assert faults == []
        unread, previous = set(report.received.unread), sent.receipts()
        for reload in (False, True):  # along routes, where the first publish showed them, and through vLLM's reload
            old = {name: tensor.clone() for name, tensor in engine.arranged(merged_weights(network))}
            step(network, int(reload))
            kept = one_of_each(name for name in old if name not in unread)
            if reload:
                engine.live.routes, engine.live.learns_routes = None, False

            def keeping(stream, kept=kept, old=old):
                return ((name, old[name] if name in kept else tensor) for name, tensor in stream)

            named = faults_of(network, engine, 1 + reload, previous, keeping)
            assert {name for kind, name in named if kind == "stale"} == kept
            faults, sent, _ = publish(network, engine, 3 + reload)
            assert faults == []
            previous = sent.receipts()
        engine.live.learns_routes = True
        assert publish(network, engine, 5)[0] == []
        if latent:
            assert engine.live.routes is not None
            for module in engine.live._derived.values():  # of a plain layer they are views, of a quantized one copies
                module.W_UK_T.data, module.W_UV.data = module.W_UK_T.data.clone(), module.W_UV.data.clone()
            step(network, 2)
            with monkeypatch.context() as patch:
                patch.setattr(derived, "make_again", lambda llm, modules: None)
                named = faults_of(network, engine, 6, None)
            pieces = {f"{name}.{piece}" for name in engine.live._derived for piece in ("W_UK_T", "W_UV")}
            assert {name for kind, name in named if kind == "derived"} == pieces
            assert publish(network, engine, 7)[0] == []
    finally:
        engine.close()


def test_what_a_loader_writes_past_the_reload_is_named(monkeypatch):
    monkeypatch.setattr(models, "PAST_RELOAD", {})
    network = eager_network(BY_TYPE["gpt_oss"], 0)
    engine = start(network, None)
    try:
        named = faults_of(network, engine, 0, None)
        lost = {f"model.layers.{i}.mlp.experts.routed_experts" for i in range(2)}
        assert {name for kind, name in named if kind == "missing"} == lost
        sinks = {f"model.layers.{i}.self_attn.sinks" for i in range(2)}
        assert {name for kind, name in named if kind == "different"} == sinks
    finally:
        engine.close()


@pytest.mark.parametrize("name", ["fp8_tensor", pytest.param("nvfp4", marks=pytest.mark.slow)])
def test_half_of_a_layer_that_the_checkpoint_fuses_is_named(name):
    network, format = eager_network(BY_TYPE["phi3"], 0), sampler_format(name)
    engine = start(network, format)
    layer = "model.layers.0.self_attn.qkv_proj"
    try:
        old = {}

        def noted(stream):
            for key, tensor in stream:
                old[key] = tensor.clone()
                yield key, tensor

        assert publish(network, engine, 0, wire=noted)[0] == []
        with torch.no_grad():
            weight = network.get_parameter(f"{layer}.weight")
            weight[:128] = weight[:128].flip(0)  # the queries', and no scale

        def half(stream):
            for key, tensor in stream:
                queries = key.startswith(layer) and tensor.ndim == 2
                yield key, torch.cat([old[key][:128].view(tensor.dtype), tensor[128:]]) if queries else tensor

        named = faults_of(network, engine, 1, None, half)
        assert {f"{layer}.{end}" for end in ("weight", "weight_packed")} & {key for kind, key in named}
        assert {key.rpartition(".")[0] for kind, key in named} == {layer}
        assert publish(network, engine, 2)[0] == []
    finally:
        engine.close()
