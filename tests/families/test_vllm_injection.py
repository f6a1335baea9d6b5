"""Through vLLM: a part that stayed behind or was exchanged between two publishes one optimizer step apart is named."""

from collections import defaultdict

import pytest
import torch

from lit_qrl.errors import ConfigError
from lit_qrl.receipts.ledger import PublishError, RefusedError
from lit_qrl.rollout.vllm import live_model, models
from tests.families.configs import BY_TYPE, FAMILIES
from tests.families.page import kept
from tests.families.test_injection import one_of_each, step
from tests.families.vllm_cells import (
    allowed,
    disagreement,
    dtype_of,
    eager_network,
    of_the_table,
    publish,
    start,
    stream,
)
from tests.vllm_engines import sampler_format

pytestmark = pytest.mark.vllm

KNOWN = [
    pytest.param(family, format, marks=[pytest.mark.slow] * (format != "plain"), id=f"{family.model_type}-{format}")
    for family in FAMILIES
    for format in ("plain", "fp8_row")
]


def check_refusal(family, format, error):
    """A family that docs/models.md says to work is refused for want of a package alone, or by an older vLLM."""
    column = f"publish/{'auto' if format == 'plain' else format}"
    said = kept(family).get("vllm", {}).get(column, {}).get("state")
    assert said != "works" or "cannot load it here" in str(error) or not of_the_table()


def faults_of(network, engine, version, previous, wire=lambda stream: stream):
    try:
        return {(fault.kind, fault.name) for fault in publish(network, engine, version, previous, wire)[0]}
    except PublishError as error:
        return {(fault.kind, fault.name) for fault in error.faults}


def exchanged(tensors, kept_back):
    """The names of two matrices of each shape, each with the other's."""
    alike = defaultdict(list)
    for name, tensor in tensors.items():
        if tensor.ndim > 1 and name not in kept_back:
            alike[tensor.shape, tensor.dtype].append(name)
    pairs = [names[:2] for names in alike.values() if len(names) > 1]
    return {one: other for pair in pairs for one, other in (pair, pair[::-1])}


@pytest.mark.parametrize(("family", "format"), KNOWN)
def test_what_stays_behind_and_what_is_exchanged_is_named(family, format, monkeypatch):
    network, latent = eager_network(family, 0), "kv_lora_rank" in family.options
    try:
        engine = start(network, sampler_format(format), dtype=dtype_of(family))
    except ConfigError as error:
        check_refusal(family, format, error)
        return
    try:
        try:
            faults, sent, report = publish(network, engine, 0)
        except (ConfigError, RefusedError) as error:  # vLLM builds no engine of it, or its loader does not know it
            check_refusal(family, format, error)
            return
        assert faults == []
        unread, previous = set(report.received.unread), sent.receipts()
        for reload in (False, True):  # along routes, where the first publish showed them, and through vLLM's reload
            old = {name: tensor.clone() for name, tensor in stream(network, engine)}
            step(network, int(reload), engine.plain_dtype)
            new = {name: tensor.clone() for name, tensor in stream(network, engine)}
            changed = {name for name in old if not torch.equal(old[name], new[name])}
            assert changed == {name for name in old if not name.endswith("weight_shape")}
            kept = one_of_each(name for name in old if name in changed - unread)
            if reload:
                engine.live.routes, engine.live.learns_routes = None, False

            def keeping(wire, kept=kept, old=old):
                return ((name, old[name] if name in kept else tensor) for name, tensor in wire)

            named = faults_of(network, engine, 1 + reload, previous, keeping)
            assert {name for kind, name in named if kind == "stale"} == kept
            faults, sent, _ = publish(network, engine, 3 + reload)
            assert faults == []
            previous = sent.receipts()
            others = exchanged(new, unread)
            assert others

            def exchanging(wire, others=others, new=new):
                return ((name, new[others.get(name, name)]) for name, _ in wire)

            named = faults_of(network, engine, 5 + reload, None, exchanging)
            assert {name for kind, name in named if kind == "swapped"} == others.keys()
            assert publish(network, engine, 7 + reload)[0] == []
        engine.live.learns_routes = True
        assert publish(network, engine, 9)[0] == []
        mean, rounding = disagreement(network, engine)
        assert mean <= allowed(engine, format, rounding)
        if latent:
            assert engine.live.routes is not None
            for module in engine.live._derived.values():  # of a plain layer they are views, of a quantized one copies
                module.W_UK_T.data, module.W_UV.data = module.W_UK_T.data.clone(), module.W_UV.data.clone()
            step(network, 2, engine.plain_dtype)
            with monkeypatch.context() as patch:
                patch.setattr(live_model, "derive_again", lambda config, modules: None)
                named = faults_of(network, engine, 10, None)
            pieces = {f"{name}.{piece}" for name in engine.live._derived for piece in ("W_UK_T", "W_UV")}
            assert {name for kind, name in named if kind == "derived"} == pieces
            assert publish(network, engine, 11)[0] == []
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
