"""Scales of an FP8 KV cache follow the weights: set where kernels read them, and as far as keys and values go."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lit_qrl.errors import ConfigError
from lit_qrl.rollout.vllm.cache_scales import (
    MARGIN,
    attentions,
    check_host,
    check_scales,
    observed,
    quantized,
    read_scales,
    set_scales,
)
from tests.vllm_engines import build_engine, disagreement, prompts, publish, tiny_network


class Impl:
    """Returns the query, as an attention might."""

    def forward(self, layer, query, key, value, *args, output=None, **kwargs):
        return query


class Attention(nn.Module):
    def __init__(self, **more):
        super().__init__()
        for kind in "kv":
            self.register_buffer(f"_{kind}_scale", torch.tensor(1.0))
            setattr(self, f"_{kind}_scale_float", 1.0)
            setattr(self, f"_{kind}_scale_cpu", torch.tensor(1.0))
        self.impl = Impl()
        vars(self).update(more)


def model(**more):
    return nn.ModuleDict({"a": Attention(**more), "b": Attention(), "other": nn.Linear(1, 1)})


def test_the_largest_of_several_calls_is_seen_and_nothing_is_left_behind():
    net = model()
    with observed(net) as seen:
        for key in (torch.tensor([1.0, -3.0]), torch.tensor([2.0, 0.5])):
            assert net["a"].impl.forward(net["a"], key, key, key / 10) is key
        net["b"].impl.forward(net["b"], key, None, None)  # nothing is put into the cache
    assert seen["a"].tolist() == pytest.approx([3.0, 0.3])
    assert "b" not in seen
    assert "forward" not in vars(net["a"].impl)


def test_rows_behind_the_tokens_of_a_padded_batch_are_not_looked_at():
    net = model()
    key = torch.tensor([[1.0], [-2.0], [torch.nan], [1e9]])  # what a CUDA graph's buffers held
    cache, two, none = (SimpleNamespace(num_actual_tokens=count) for count in (4, 2, 0))
    with observed(net) as seen:
        net["a"].impl.forward(net["a"], key, key, key, cache, two)
        net["b"].impl.forward(net["b"], key, key, key, kv_cache=cache, attn_metadata=none)
    assert seen["a"].tolist() == [2.0, 2.0]
    assert "b" not in seen


def test_scales_lie_where_kernels_and_graphs_read_them():
    net = model()
    places = [net["a"]._k_scale.data_ptr(), net["b"]._v_scale_cpu.data_ptr()]
    given = {"a": torch.tensor([448.0, 4.48]), "b": torch.tensor([0.0, 896.0])}
    assert set_scales(net, given, "fp8") == read_scales(net)
    assert read_scales(net)["a"] == pytest.approx((MARGIN, MARGIN / 100))
    assert read_scales(net)["b"] == pytest.approx((MARGIN / 448, 2 * MARGIN))  # where all are 0 any scale does
    assert net["b"]._v_scale_float == float(net["b"]._v_scale_cpu) == 2 * MARGIN
    assert places == [net["a"]._k_scale.data_ptr(), net["b"]._v_scale_cpu.data_ptr()]
    with pytest.raises(RuntimeError, match="No keys and values of b were seen"):
        set_scales(net, {"a": given["a"]}, "fp8")


def test_what_does_not_arrive_is_named():
    net = nn.ModuleDict({"a": Attention()})
    net["a"]._k_scale = torch.zeros((), dtype=torch.int32)  # which holds no fraction
    with pytest.raises(RuntimeError, match="The cache of a has scales"):
        set_scales(net, {"a": torch.tensor([1.0, 1.0])}, "fp8")


def test_other_caches_are_refused():
    assert quantized("fp8_e5m2")
    assert not quantized("bf16")
    check_scales(model())
    with pytest.raises(ConfigError, match=r"latent attention.* in a.*kv_cache_dtype to auto"):
        check_scales(model(kv_lora_rank=4))
    with pytest.raises(ConfigError, match="another layer's cache, in a"):
        check_scales(model(kv_sharing_target_layer_name="b"))
    with pytest.raises(ConfigError, match="none that was found"):
        check_scales(nn.Linear(1, 1))


def without_avx512(monkeypatch):
    for name in ("_is_avx512_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_a_cpu_that_cannot_keep_it_is_refused_before_anything_is_loaded(monkeypatch):
    without_avx512(monkeypatch)
    check_host("auto")
    with pytest.raises(
        ConfigError, match=r"AVX-512 or AMX.*kv_cache_dtype: fp8\. Set data\.engine\.kv_cache_dtype to auto"
    ):
        check_host("fp8")


@torch.no_grad()
def largest_of(network, asked):
    """By layer the largest key and value that a forward pass of the learner keeps."""
    found = torch.zeros(network.config.num_hidden_layers, 2)
    for prompt in asked:
        kept = network(input_ids=torch.tensor([prompt]), use_cache=True).past_key_values
        now = [[layer.keys.abs().max(), layer.values.abs().max()] for layer in kept.layers]
        found = torch.maximum(found, torch.tensor(now))
    return found


@pytest.mark.vllm
def test_scales_are_those_of_the_weights_that_were_published(margin):
    network, asked = tiny_network(), prompts()
    if not (torch.cuda.is_available() or torch.cpu._is_avx512_supported()):  # one of which vLLM's cache needs
        with pytest.raises(ConfigError, match="AVX-512 or AMX"):
            build_engine(network, kv_cache_dtype="fp8")
        return
    with torch.no_grad():  # values that a scale of 1 would round to nothing
        for layer in network.model.layers:
            layer.self_attn.v_proj.weight.mul_(1e-3)
            layer.self_attn.o_proj.weight.mul_(1e3)
    engine = build_engine(network, kv_cache_dtype="fp8")
    try:
        publish(network, engine, None, 0)
        engine._scales_due = False
        without = disagreement(network, engine)
        engine._reset_caches()
        for version in range(1, 3):
            assert publish(network, engine, None, version)[0] == []
            calibrated = disagreement(network, engine)
            assert calibrated < without / 4
            held = torch.tensor(list(read_scales(engine.live.model).values()))
            # Keys and values after the first layer come of attention over what the cache has rounded.
            torch.testing.assert_close(held * 448 / MARGIN, largest_of(network, asked), rtol=0.1, atol=0)
            assert not engine._scales_due
            margin(
                f"FP8 KV cache, version {version}: mean |Δ log p|", f"{calibrated:.4f}, {without:.4f} with scales of 1"
            )
            with torch.no_grad():
                for layer in network.model.layers:
                    layer.self_attn.v_proj.weight.mul_(0.1)
                    layer.self_attn.o_proj.weight.mul_(10)
        assert len(attentions(engine.live.model)) == 2
    finally:
        engine.close()
