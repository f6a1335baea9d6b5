"""Publishes along learned routes hold exactly what vLLM's own reload would have put there."""

import pytest
import torch
from transformers import Qwen3MoeConfig

from lit_qrl.rollout.vllm import live_model as vllm_direct
from lit_qrl.rollout.vllm.locations import tensors_of
from tests.vllm_engines import (
    FORMATS,
    checkpoint,
    disagreement,
    named,
    optimizer_step,
    publish,
    sampler_format,
    tiny_network,
)

pytestmark = pytest.mark.vllm

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 72, "norm_topk_prob": True}


def held(engine):
    """Every number of the modules that a stream fills."""
    modules = {place.module_name: place.module for place in engine.live.routes.places.values()}
    return {
        f"{name}.{key}": tensor.detach().clone()
        for name, module in modules.items()
        for key, tensor in tensors_of(module).items()
    }


def bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8)


@pytest.mark.parametrize("name", [*FORMATS, "experts"])
def test_the_modules_hold_what_a_reload_puts_there(name, monkeypatch, built):
    kind, name = ((Qwen3MoeConfig,), "plain") if name == "experts" else ((), name)
    format, network = sampler_format(name), tiny_network(*kind, dtype=torch.bfloat16, **(EXPERTS if kind else {}))
    engine = built(network, format)
    assert publish(network, engine, format, 0, everywhere=True)[0] == []
    before = held(engine)
    optimizer_step(network, seed=1, learning_rate=0.02)
    with monkeypatch.context() as patch:
        patch.setattr("vllm.model_executor.model_loader.reload.initialize_layerwise_reload", None)  # would fail
        assert publish(network, engine, format, 1, everywhere=True)[0] == []
    along = held(engine)
    assert along
    engine.live.routes = None
    assert publish(network, engine, format, 2, everywhere=True)[0] == []
    again = held(engine)
    assert along.keys() == again.keys() == before.keys()
    assert all(torch.equal(bits(along[key]), bits(again[key])) for key in along)
    assert any(not torch.equal(bits(along[key]), bits(before[key])) for key in along)
    assert disagreement(network, engine, format) < 0.05


def test_weights_that_lie_as_they_were_sent_are_copied(format_rows, built):
    format_rows("fp8_block", vllm_copied_on=("cpu", "cuda"))
    format, network = sampler_format("fp8_block"), tiny_network(dtype=torch.bfloat16)
    engine = built(network, format)
    assert publish(network, engine, format, 0)[0] == []
    routes = engine.live.routes
    fused = "model.layers.0.self_attn.qkv_proj"
    assert routes.copies(fused)
    assert not routes.copies("lm_head")
    memory = {name: view.data_ptr() for name, view in routes.views.items()}
    for version in range(1, 3):
        optimizer_step(network, seed=version, learning_rate=0.02)
        assert publish(network, engine, format, version, everywhere=True)[0] == []
        assert disagreement(network, engine, format) < 0.05
    assert memory == {name: view.data_ptr() for name, view in routes.views.items()}
    sent = dict(checkpoint(network, engine, format))
    for name in routes.views:
        assert torch.equal(bits(engine.read_back(name)), bits(sent[name]))

    def broken(target, change):
        return lambda stream: ((name, change(tensor) if name == target else tensor) for name, tensor in stream)

    target = "model.layers.0.self_attn.k_proj.weight"
    faults = publish(network, engine, format, 3, wire=broken(target, lambda codes: codes.flip(0)))[0]
    assert ("different", target) in named(faults)
    faults = publish(network, engine, format, 4, wire=broken(target, lambda codes: codes[:64]))[0]
    assert ("shape", target) in named(faults)
    scale = f"{target}_scale"
    faults = publish(network, engine, format, 5, wire=broken(scale, lambda scales: scales.float() * 1.001))[0]
    assert ("dtype", scale) in named(faults)
    assert publish(network, engine, format, 6)[0] == []


def test_a_tensor_that_no_module_takes_is_named(built):
    network = tiny_network()
    engine = built(network)
    assert publish(network, engine, None, 0)[0] == []

    def longer(stream):
        yield from stream
        yield "model.layers.9.mlp.down_proj.weight", torch.ones(2, 2)

    faults = publish(network, engine, None, 1, wire=longer)[0]
    assert ("missing", "model.layers.9.mlp.down_proj.weight") in named(faults)


def test_a_layer_whose_repacking_fails_keeps_its_weights(monkeypatch, built):
    network = tiny_network()
    engine = built(network)
    assert publish(network, engine, None, 0)[0] == []
    before = held(engine)
    target = engine.live.locate_layer("model.layers.1.mlp.down_proj").module

    def fail(layer):
        raise RuntimeError("no kernel")

    with monkeypatch.context() as patch:
        patch.setattr(target.quant_method, "process_weights_after_loading", fail)
        with pytest.raises(RuntimeError, match="no kernel"):
            vllm_direct.repack(target, lambda: None)
    after = held(engine)
    assert all(torch.equal(bits(before[key]), bits(after[key])) for key in before)
    assert publish(network, engine, None, 1)[0] == []
    assert disagreement(network, engine) < 1e-4
