"""Publishes that go wrong on their way into a live vLLM, one optimizer step after a good one: each is named."""

from types import SimpleNamespace

import pytest
import torch

from lit_qrl.receipts.ledger import Fault, PublishError
from lit_qrl.rollout.engine import EngineDiedError
from tests.vllm_engines import (
    FORMATS,
    build_engine,
    checkpoint,
    named,
    one_step_behind,
    prompts,
    publish,
    sampler_format,
    tiny_network,
)

pytestmark = pytest.mark.vllm

RELOADED = ["plain reloaded", "int4_group reloaded"]  # every stream through vLLM's own reload
O_PROJ = "model.layers.{}.self_attn.o_proj"
NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture(scope="module", params=[*FORMATS, *RELOADED])
def held(request):
    """An engine that holds the weights of before one optimizer step, with what was sent to it then."""
    name, _, reloaded = request.param.partition(" ")
    format, network = sampler_format(name), tiny_network()
    engine = build_engine(network, format)
    assert publish(network, engine, format, 0)[0] == []
    assert engine.live.routes is not None
    if reloaded:
        engine.live.routes, engine.live.learns_routes = None, False
    yield from one_step_behind(network, engine, format)


def corrupted(state, corrupt, **options):
    """The faults of a publish whose stream passes through `corrupt(tensors, old) -> tensors` on its way."""

    def wire(stream):
        yield from corrupt(dict(stream), state.old).items()

    given = state.network, state.engine, state.format, state.version, state.previous, wire
    return publish(*given, **{"everywhere": True} | options)[0]


def of_ledgers(faults):
    """Without those of reading back, which repeat what the ledgers already say."""
    return {(kind, name) for kind, name in named(faults) if kind not in ("read_back", "gemm")}


def codes_of(layer, tensors):
    return next(name for name in (f"{layer}.weight", f"{layer}.weight_packed") if name in tensors)


def changed(tensors, old, suffix):
    """Tensors of that suffix that the step moved."""
    names = [name for name in tensors if name.endswith(suffix) and not torch.equal(tensors[name], old[name])]
    assert names
    return names


def test_skipped_layer(held):
    state = held()
    faults = corrupted(state, lambda new, old: {name: t for name, t in new.items() if ".layers.1." not in name})
    skipped = {("missing", name) for name in state.old if ".layers.1." in name}
    assert skipped <= named(faults)
    assert ("missing", "model.layers.1.mlp.gate_up_proj") in named(faults)  # the engine misses it by itself, too


def test_dropped_k_proj_is_refused_and_the_old_weights_stay(held):
    state = held()
    layer = "model.layers.0.self_attn.q_proj"
    before = state.engine.read_columns(layer, [0, 5, 77])
    with pytest.raises(PublishError) as caught:
        corrupted(
            state, lambda new, old: {name: t for name, t in new.items() if "layers.0.self_attn.k_proj" not in name}
        )
    expected = Fault("fused_group", "model.layers.0.self_attn.qkv_proj", "without k_proj")
    assert caught.value.faults == [expected]
    assert torch.equal(state.engine.read_columns(layer, [0, 5, 77]), before)
    with pytest.raises(RuntimeError, match="no complete weights"):
        state.engine.generate(prompts(1), 1, 0)


def test_two_layers_exchanged(held):
    state = held()

    def exchange(new, old):
        swapped = {}
        for name in new:
            other = name.replace("layers.0", "layers.9").replace("layers.1", "layers.0").replace("layers.9", "layers.1")
            swapped[name] = new[other] if "o_proj" in name else new[name]
        return swapped

    faults = named(corrupted(state, exchange))
    for layer in (0, 1):
        assert ("swapped", codes_of(O_PROJ.format(layer), state.old)) in faults
        assert ("gemm", f"{O_PROJ.format(layer)}.weight") in faults


def test_stale_scale(held):
    state = held()
    if state.format is None:
        target = codes_of(O_PROJ.format(0), state.old)
        faults = corrupted(state, lambda new, old: new | {target: old[target]})
    else:
        fresh = dict(checkpoint(state.network, state.engine, state.format))
        target = changed(fresh, state.old, ".weight_scale")[0]
        faults = corrupted(state, lambda new, old: new | {target: old[target]})
    assert ("stale", target) in named(faults)


def test_wrong_scale(held):
    state = held()
    suffix = {None: ".o_proj.weight"}.get(state.format, ".o_proj.weight_scale")
    suffix = ".k_proj.weight_global_scale" if state.format and state.format.name == "nvfp4" else suffix
    target = next(name for name in state.old if name.endswith(suffix))
    faults = corrupted(state, lambda new, old: new | {target: (new[target].float() * 2).to(new[target].dtype)})
    assert ("different", target) in named(faults)


def test_wrong_version(held):
    state = held()
    load = state.engine.load_weights
    names = ("plain_dtype", "spec", "arranged", "read_columns", "read_back", "read_receipts")
    engine = SimpleNamespace(**{name: getattr(state.engine, name) for name in names if hasattr(state.engine, name)})
    engine.load_weights = lambda stream, format, version: load(stream, format, version - 1)
    faults, _, _ = publish(state.network, engine, state.format, state.version, state.previous)
    assert [fault.kind for fault in faults] == ["version"]
    assert f"sent {state.version}, stamped {state.version - 1}" in str(faults[0])


def test_not_finite_on_the_way(held):
    state = held()
    faults = corrupted(state, lambda new, old: new | {NORM: torch.full_like(new[NORM], float("nan"))})
    assert ("non_finite", NORM) in named(faults)


def test_not_finite_at_the_sender_is_refused_and_named(held):
    state = held()
    kept = state.network.get_parameter(NORM).data.clone()
    state.network.get_parameter(NORM).data[3] = float("inf")
    with pytest.raises(ValueError, match=NORM):
        publish(state.network, state.engine, state.format, state.version)
    state.network.get_parameter(NORM).data.copy_(kept)
    with pytest.raises(RuntimeError, match="no complete weights"):
        state.engine.score(prompts(1))


def test_changed_rotary_table(held, monkeypatch):
    """What no publish sends is looked at with each, and after a sleep; `outcome_json` is what a server answers."""
    state = held()
    engine, name = state.engine, "model.layers.0.self_attn.rotary_emb.cos_sin_cache"
    fault, table = ("buffer", name), state.engine.live.model.get_buffer(name)
    table[1, 0] += 2**-4
    try:
        assert of_ledgers(corrupted(state, lambda tensors, old: tensors)) == {fault}
        assert [one[:2] for one in engine.llm.collective_rpc("outcome_json")[0]["faults"]] == [list(fault)]
        engine._asleep = True
        monkeypatch.setattr(engine.llm, "wake_up", lambda: None)
        with pytest.raises(EngineDiedError, match=f"did not wake: RuntimeError: buffer: {name} is no longer"):
            engine.wake()
    finally:
        table[1, 0] -= 2**-4
        engine._asleep = False
    assert corrupted(state, lambda tensors, old: tensors) == []


def test_prefix_cache_not_reset(held, monkeypatch):
    state = held()
    monkeypatch.setattr(state.engine.llm, "reset_prefix_cache", lambda **options: False)
    assert [fault.kind for fault in corrupted(state, lambda new, old: new)] == ["prefix_cache"]


def test_wrong_dtype(held):
    state = held()
    other = torch.bfloat16 if state.engine.plain_dtype == torch.float32 else torch.float32
    faults = corrupted(state, lambda new, old: new | {NORM: new[NORM].to(other)})
    assert of_ledgers(faults) == {("dtype", NORM)}


def test_tensor_sent_twice(held):
    state = held()

    def wire(stream):
        for name, tensor in stream:
            yield name, tensor
            if name == NORM:
                yield name, tensor

    faults, _, _ = publish(state.network, state.engine, state.format, state.version, state.previous, wire)
    assert ("twice", NORM) in named(faults)


def test_engine_that_does_not_take_over_what_it_repacked(held, monkeypatch):
    from vllm.model_executor.model_loader.reload import layerwise

    state = held()
    target = state.engine.live.locate_layer(O_PROJ.format(0)).module
    copy_back = layerwise._copy_and_restore_kernel_tensors
    if state.format is None:  # plain weights are packed into a closure of the layer
        old = target.cpu_linear

        def forget(layer, info):
            copy_back(layer, info)
            if layer is target:
                layer.cpu_linear = old
    else:

        def forget(layer, info):
            if layer is target:
                layerwise._place_kernel_tensors(layer, info)
            else:
                copy_back(layer, info)

    monkeypatch.setattr(layerwise, "_copy_and_restore_kernel_tensors", forget)
    faults = named(corrupted(state, lambda new, old: new))
    if state.format is None:
        assert ("gemm", f"{O_PROJ.format(0)}.weight") in faults
    else:
        assert any(kind == "not_copied" and O_PROJ.format(0) in name for kind, name in faults)
