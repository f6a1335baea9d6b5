"""Faults of vLLM itself and of an engine's life: what the handling prevents, and that clean publishes raise none."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import Qwen3MoeConfig

from lit_qrl.network.linears import quantizable_linears
from lit_qrl.network.stream import weight_stream
from lit_qrl.publish.probe import Probe, learner_scores
from lit_qrl.receipts.ledger import PublishError, SentLedger, compare, compare_columns
from lit_qrl.rollout.vllm import live_model
from lit_qrl.rollout.vllm.installation import installed_version
from tests.vllm_engines import (
    FORMATS,
    VOCABULARY,
    checkpoint,
    disagreement,
    gemm_shares,
    named,
    optimizer_step,
    prompts,
    publish,
    sampler_format,
    tiny_network,
)

pytestmark = pytest.mark.vllm

PACKS_ON_CPU = (0, 27)  # from this version on the CPU build packs experts and heads, and forgets it in a reload


def test_half_an_adapter(built):
    lora = LoraConfig(r=8, lora_alpha=8, target_modules=["q_proj", "o_proj"])
    network = tiny_network()
    engine = built(network, None, lora, max_lora_rank=8)
    publish(network, engine, None, 0)
    tensors = get_peft_model_state_dict(get_peft_model(copy.deepcopy(network), lora))
    sent = SentLedger(1)
    assert compare(sent, engine.load_adapter(sent.watch(iter(tensors.items())), 1).received) == []
    previous = sent.receipts()
    tensors = {name: tensor + 4e-5 for name, tensor in tensors.items()}
    half = {name: tensor for name, tensor in tensors.items() if "layers.1" not in name}
    sent = SentLedger(2)
    list(sent.watch(iter(tensors.items())))
    faults = compare(sent, engine.load_adapter(iter(half.items()), 2).received, previous)
    assert named(faults) == {("missing", name) for name in tensors if "layers.1" in name}
    with pytest.raises(PublishError, match="lora_B"):
        engine.load_adapter(((name, tensor) for name, tensor in tensors.items() if "lora_A" in name), 3)
    with pytest.raises(RuntimeError, match="no complete weights"):
        engine.generate(prompts(1), 1, 0)


def test_an_adapter_over_a_tied_head_smaller_than_the_hidden_size(built):
    lora = LoraConfig(r=8, lora_alpha=8, target_modules=["q_proj", "o_proj", "gate_proj"])
    network = tiny_network(vocab_size=24, tie_word_embeddings=True)
    engine = built(network, None, lora, max_lora_rank=8)
    assert publish(network, engine, None, 0)[0] == []
    adapted = engine.llm.collective_rpc("adapted_layers")[0]
    assert {name.rpartition(".")[2] for name in adapted} == {"qkv_proj", "o_proj", "gate_up_proj"}
    model = get_peft_model(copy.deepcopy(network), lora)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    tensors = get_peft_model_state_dict(model)
    sent = SentLedger(1)
    assert compare(sent, engine.load_adapter(sent.watch(iter(tensors.items())), 1).received) == []
    tokens = [[3, 5, 9, 4, 8, 20]]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(tokens)).logits[0, :-1].log_softmax(-1)
    expected = logits.gather(1, torch.tensor(tokens[0][1:])[:, None])[:, 0]
    assert torch.allclose(engine.score(tokens)[0], expected, atol=1e-3)


@pytest.mark.parametrize("name", ["plain", "int4_group", "nvfp4"])
def test_weights_that_a_sleep_dropped_come_back_along_the_learned_routes(name, monkeypatch, built):
    from vllm.model_executor.model_loader import reload

    format, network = sampler_format(name), tiny_network(dtype=torch.bfloat16)
    engine = built(network, format, dtype="bf16")
    assert publish(network, engine, format, 0)[0] == []
    for parameter in engine.live.model.parameters():
        parameter.data.untyped_storage().fill_(0xFF)  # NaN where it is a float
    engine._asleep, engine._usable = True, False
    monkeypatch.setattr(engine.llm, "wake_up", lambda: None)
    engine.wake()
    with pytest.raises(RuntimeError, match="no complete weights"):
        engine.generate(prompts(1), 1, 0)
    with monkeypatch.context() as patch:
        patch.setattr(reload, "initialize_layerwise_reload", None)
        assert publish(network, engine, format, 1, everywhere=True)[0] == []
    assert disagreement(network, engine, format) < 0.05
    without = (item for item in checkpoint(network, engine, format) if "layers.1.mlp.down_proj" not in item[0])
    assert ("missing", "model.layers.1.mlp.down_proj") in named(engine.load_weights(without, format, 2).received.faults)


@pytest.mark.parametrize("dtype, count", [("auto", 200), ("bf16", 25), ("fp16", 25)])
@pytest.mark.parametrize("name", FORMATS)
def test_two_hundred_clean_publishes_raise_no_alarm(name, dtype, count, margin, built):
    format, network = sampler_format(name), tiny_network()
    engine = built(network, format, dtype=dtype)
    probe = Probe(VOCABULARY, format is not None and format.quantizes_activations)
    previous, alarms, furthest = None, [], 0.0
    for version in range(count):
        faults, sent, _ = publish(network, engine, format, version, previous)
        alarms += faults
        furthest = max(furthest, *gemm_shares(sent, engine, format).values())
        if version % 25 == 0:
            scores = learner_scores(network, probe.tokens, format, dtype=engine.plain_dtype)
            alarms += [] if probe.compare(engine.score(probe.tokens), scores).passed else ["probe"]
        previous = sent.receipts()
        optimizer_step(network, seed=version)
    shown = str(engine.plain_dtype).removeprefix("torch.")
    margin(f"clean {name}, GEMM at most as a share of its bound", f"{furthest:.2f} ({count} in {shown})")
    assert alarms == []


def test_pages_with_nan_do_not_outlive_the_weights_that_made_them(built):
    network = tiny_network()
    engine = built(network, dtype="bf16", engine_args={"num_gpu_blocks_override": 9})  # the same pages again
    publish(network, engine, None, 0)
    broken = torch.full((128,), float("nan"), dtype=torch.bfloat16)
    engine.perturb(iter([("model.layers.0.input_layernorm.weight", broken)]), 1)
    assert not torch.cat(engine.score(prompts(8))).isfinite().any()
    assert publish(network, engine, None, 2)[0] == []
    assert disagreement(network, engine) < 0.05


def test_experts_are_stale_without_the_workaround(monkeypatch, built):
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
    network = tiny_network(Qwen3MoeConfig, **sizes)
    engine = built(network)
    publish(network, engine, None, 0)
    optimizer_step(network, learning_rate=0.03)
    with monkeypatch.context() as patch:
        patch.setattr(live_model, "forget_kernels", lambda model: None)
        publish(network, engine, None, 1)
    stale = installed_version()[0] >= PACKS_ON_CPU
    assert (disagreement(network, engine) > 0.05) == stale
    publish(network, engine, None, 2)
    assert disagreement(network, engine) < 1e-4


def test_tied_head_is_stale_without_the_workaround_and_noticed(monkeypatch, built):
    network = tiny_network(tie_word_embeddings=True)
    engine = built(network)
    with monkeypatch.context() as patch:
        patch.setattr(live_model, "pack_again", lambda module: None)
        stale = installed_version()[0] >= PACKS_ON_CPU
        expected = {("gemm", "lm_head.weight")} if stale else set()
        assert named(publish(network, engine, None, 0)[0]) == expected
    assert publish(network, engine, None, 1)[0] == []


def test_separate_global_scales_of_a_fused_layer_are_noticed(built):
    format, network = sampler_format("nvfp4"), tiny_network()
    with torch.no_grad():
        network.model.layers[0].self_attn.k_proj.weight.mul_(3)
    engine = built(network, format)
    assert publish(network, engine, format, 0, everywhere=True)[0] == []
    layers = list(quantizable_linears(network))

    def separately(stream):
        own = {}
        for layer in layers:
            pair = (f"{layer}.weight", network.get_parameter(f"{layer}.weight").detach())
            own |= dict(weight_stream([pair], format, [layer]))
        return ((name, own.get(name, tensor)) for name, tensor in stream)

    sent = SentLedger(1, format, {layer: tuple(network.get_submodule(layer).weight.shape) for layer in layers})
    list(sent.watch(separately(checkpoint(network, engine, format))))
    engine.load_weights(separately(checkpoint(network, engine, format)), format, 1)
    wrong = {fault.name for fault in compare_columns(sent, engine.read_columns, exact=False)}
    assert "model.layers.0.self_attn.k_proj.weight" in wrong
