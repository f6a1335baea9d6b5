"""The real vLLM on CPU: every format is loaded, published again, verified, and followed by what is generated."""

import copy
import logging
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import Qwen2Config, Qwen3MoeConfig

from lit_qrl.errors import ConfigError
from lit_qrl.publish.probe import Probe, learner_scores
from lit_qrl.receipts.ledger import SentLedger, compare
from lit_qrl.types import SamplingParams
from tests.vllm_engines import (
    COMPLETION_LIMIT,
    VOCABULARY,
    build_engine,
    disagreement,
    optimizer_step,
    prompts,
    publish,
    reference_logprobs,
    sampler_format,
    tiny_network,
)

pytestmark = pytest.mark.vllm

# Mean |Δ log p| to the learner computing in the format: rounding that flips an 8-bit activation now and then moves it
# by up to a hundredth in fp32; int4 runs in bf16, as its kernel takes nothing else.
BOUNDS = {"plain": 1e-4, "nvfp4": 1e-4, "int4_group": 0.02, "int8_channel": 5e-3, "fp8_block": 0.015}
BOUNDS |= {"fp8_row": 0.015, "fp8_tensor": 0.015}


@pytest.mark.parametrize("name", BOUNDS)
def test_publishes_arrive_and_generation_follows(name, built):
    format, network = sampler_format(name), tiny_network()
    engine = built(network, format)
    activations = format is not None and format.quantizes_activations
    probe, previous = Probe(VOCABULARY, activations), None
    for version in range(4):
        faults, sent, report = publish(network, engine, format, version, previous)
        assert faults == []
        assert report.version == engine.version == version
        loaded = {key.rpartition(".")[0]: value for key, value in report.layers.items()}
        expected = {"plain": "fp32"}.get(name, name)
        assert {loaded[f"model.layers.{i}.mlp.down_proj"] for i in (0, 1)} == {expected}
        assert {loaded[f"model.layers.{i}.self_attn.k_proj"] for i in (0, 1)} == {expected}
        assert loaded["lm_head"] == loaded["model.norm"] == ("bf16" if name == "int4_group" else "fp32")
        scores = learner_scores(network, probe.tokens, format, dtype=engine.plain_dtype)
        assert probe.compare(engine.score(probe.tokens), scores).passed
        assert disagreement(network, engine, format) < BOUNDS[name]
        previous, before = sent.receipts(), copy.deepcopy(network)
        optimizer_step(network, seed=version, learning_rate=4e-5 if version < 2 else 0.03)
    assert disagreement(network, engine, format) > 0.1  # the engine still holds the weights of before the step
    assert disagreement(before, engine, format) < BOUNDS[name]


@pytest.mark.parametrize("vocabulary", [512, 501])  # vLLM pads to a multiple of 64
@pytest.mark.parametrize("name", ["fp8_row", "fp8_tensor", "int8_channel", "int4_group", "nvfp4"])
def test_a_quantized_head_arrives_too(name, vocabulary, built):
    format, network = sampler_format(name), tiny_network(vocab_size=vocabulary)
    engine = built(network, format, spec={"quantize_head": True})
    probe, previous = Probe(vocabulary, format.quantizes_activations), None
    for version in range(3):
        faults, sent, report = publish(network, engine, format, version, previous, everywhere=True)
        assert faults == []
        loaded = {key.rpartition(".")[0]: value for key, value in report.layers.items()}
        assert loaded["lm_head"] == name
        assert loaded["model.embed_tokens"] == ("bf16" if name == "int4_group" else "fp32")
        assert engine.read_columns("lm_head", [0, 5]) is not None
        scores = learner_scores(network, probe.tokens, format, dtype=engine.plain_dtype, head=True)
        got = engine.score(probe.tokens)
        assert probe.compare(got, scores).mean < BOUNDS[name]
        plain_head = learner_scores(network, probe.tokens, format, dtype=engine.plain_dtype)
        assert probe.compare(got, plain_head).mean > probe.compare(got, scores).mean
        previous = sent.receipts()
        optimizer_step(network, seed=version, learning_rate=4e-5 if version < 1 else 0.03)


MODELS = {
    "tied head": {"tie_word_embeddings": True},
    "tied head, odd vocabulary": {"tie_word_embeddings": True, "vocab_size": 501},
    "biases, odd vocabulary": {"config_class": Qwen2Config, "vocab_size": 501, "head_dim": 32},
    "experts": {
        **{"config_class": Qwen3MoeConfig, "num_experts": 8, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 128, "norm_topk_prob": True},
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_other_models_follow_too(name, built):
    network = tiny_network(**MODELS[name])
    engine = built(network)
    for version in range(3):
        faults, _, report = publish(network, engine, None, version)
        assert faults == []
        asked = [[token % 500 for token in prompt] for prompt in prompts()]
        for prompt, completion in zip(asked, engine.generate(asked, 1, seed=version), strict=True):
            expected = reference_logprobs(network, prompt, completion.token_ids)
            assert (torch.tensor(completion.logprobs) - expected).abs().max() < 1e-4
        assert report.received.unread == []
        optimizer_step(network, seed=version, learning_rate=0.03)


@pytest.mark.parametrize("name", ["plain", "int4_group", "fp8_row"])
def test_adapter_follows_over_an_unchanged_base(name, built):
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = LoraConfig(r=4, lora_alpha=12, target_modules=layers)
    format, base = sampler_format(name), tiny_network()
    engine = built(base, format, lora, max_lora_rank=8)
    learner = get_peft_model(copy.deepcopy(base), lora)
    generator = torch.Generator().manual_seed(0)
    assert publish(base, engine, format, 0)[0] == []
    for version in (1, 2, 3):
        with torch.no_grad():
            for key, parameter in learner.named_parameters():
                if "lora_" in key:
                    parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
        tensors = get_peft_model_state_dict(learner)
        tensors = {key: tensor.to(engine.plain_dtype) for key, tensor in tensors.items()}
        untouched = {key: tensor.clone() for key, tensor in tensors.items()}
        sent = SentLedger(version)
        report = engine.load_adapter(sent.watch(iter(tensors.items())), version)
        assert compare(sent, report.received) == []
        assert all(torch.equal(tensors[key], untouched[key]) for key in tensors)
        asked = [prompt[:140] for prompt in prompts(3)]
        scores = learner_scores(learner.base_model.model, asked, format, merged=False, dtype=engine.plain_dtype)
        for got, expected in zip(engine.score(asked), scores, strict=True):
            assert (got - expected).abs().mean() < 3 * BOUNDS[name]
        assert engine.generate(prompts(1), 1, 0)[0].version == version
        assert disagreement(base, engine, format) > 0.05
    optimizer_step(base, learning_rate=0.02)
    assert publish(base, engine, format, 4)[0] == []  # merged weights: the adapter is off
    assert disagreement(base, engine, format) < 2 * BOUNDS[name]


@pytest.fixture(scope="module")
def plain():
    """A network and an engine that holds its weights; tests leave both as they found them."""
    network = tiny_network()
    engine = build_engine(network)
    before = torch.get_rng_state(), torch.get_num_threads()
    publish(network, engine, None, 0)
    assert torch.equal(torch.get_rng_state(), before[0])
    torch.set_num_threads(before[1] + 1)
    assert torch.get_num_threads() == before[1] + 1
    torch.set_num_threads(before[1])
    yield network, engine
    engine.close()


def test_same_seed_same_tokens_whatever_the_batch(plain):
    _, engine = plain
    state = torch.get_rng_state()
    asked = prompts(6)
    together = engine.generate(asked, 3, seed=5)
    assert len(together) == 18
    again = engine.generate(asked, 3, seed=5)
    assert [c.token_ids for c in again] == [c.token_ids for c in together]
    alone = engine.generate(asked[:1], 3, seed=5)
    assert [c.token_ids for c in alone] == [c.token_ids for c in together[:3]]
    other = engine.generate(asked, 3, seed=6)
    assert [c.token_ids for c in other] != [c.token_ids for c in together]
    assert len({tuple(c.token_ids) for c in together}) == 18
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("several", [False, True])
def test_completions_are_handed_out_by_number_and_a_part_of_an_engine_hands_out_its_own(plain, monkeypatch, several):
    _, engine = plain
    asked, handed = [prompts(1, 20)[0], prompts(1, 50)[0]], []
    expected = engine.generate(asked, 2, seed=5, positions=[4, 6])

    def joined(given, numbers, call, group):
        assert group == "both"
        return [[9] * 30, *given, [8]], [0, *numbers, 7], slice(1, 3)

    if several:
        monkeypatch.setattr(engine, "processes", "both")
        monkeypatch.setattr("lit_qrl.rollout.vllm.parallel.joined", joined)
    drawn = engine.generate(asked, 2, seed=5, positions=[4, 6], finished=handed.append)
    assert {number: one for part in handed for number, one in part.items()} == dict(enumerate(drawn))
    assert [one.token_ids for one in drawn] == [one.token_ids for one in expected]


def test_logprobs_are_those_of_the_processed_distribution(plain):
    network, engine = plain
    warm = SamplingParams(max_tokens=12, temperature=0.7, ignore_stop=True)
    assert disagreement(network, engine, temperature=0.7, sampling=warm) < 1e-4
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_stop=True)
    assert disagreement(network, engine, sampling=greedy) < 1e-4
    assert engine.generate(prompts(), 1, 1, sampling=greedy) == engine.generate(prompts(), 1, 2, sampling=greedy)
    # Truncated: one constant per position, minus the log of the kept mass.
    nucleus = SamplingParams(max_tokens=12, top_k=4, ignore_stop=True)
    asked = prompts()
    for prompt, completion in zip(asked, engine.generate(asked, 1, 3, sampling=nucleus), strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.no_grad():
            full = network(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(dim=-1)
        kept = full.topk(4, dim=-1).values.logsumexp(dim=-1)
        drawn = full.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(completion.logprobs), drawn - kept, atol=1e-4)


def test_stop_tokens_end_a_completion_and_belong_to_it(plain):
    _, engine = plain
    stops = tuple(range(0, VOCABULARY, 32))
    drawn = engine.generate(prompts(8), 2, 4, sampling=SamplingParams(max_tokens=24, stop_token_ids=stops))
    assert {completion.finish_reason for completion in drawn} == {"stop", "length"}
    for completion in drawn:
        inside, last = completion.token_ids[:-1], completion.token_ids[-1]
        assert not set(inside) & set(stops)
        assert (last in stops) == (completion.finish_reason == "stop")
        assert len(completion.logprobs) == len(completion.token_ids)


def test_progress_moves_to_the_end(plain):
    _, engine = plain
    seen = []
    engine.generate(prompts(40, length=20), 1, 0, progress=lambda done, tokens: seen.append((done, tokens)))
    assert seen == sorted(seen)
    assert len(seen) > 1
    assert seen[-1] == (40, 40 * COMPLETION_LIMIT)


def test_score_is_the_learners_at_temperature_one(plain):
    network, engine = plain
    sequences = [prompt[:length] for prompt, length in zip(prompts(), (2, 30, 100, 143), strict=True)]
    for sequence, score in zip(sequences, engine.score(sequences), strict=True):
        expected = reference_logprobs(network, sequence[:1], sequence[1:])
        assert score.shape == (len(sequence) - 1,)
        assert torch.allclose(score, expected, atol=1e-4)


def test_longest_sequence_fits_and_is_scored(plain):
    _, engine = plain
    whole = (prompts(1)[0] * 2)[: 160 + COMPLETION_LIMIT]
    assert engine.score([whole])[0].shape == (len(whole) - 1,)
    assert len(engine.generate([whole[:160]], 1, 0)[0].token_ids) == COMPLETION_LIMIT


def test_seeded_requests_survive_more_prefill_than_fits_a_batch(plain):
    _, engine = plain
    asked = [prompt[:150] for prompt in prompts(30)]
    drawn = engine.generate(asked, 1, 0, sampling=SamplingParams(max_tokens=2, ignore_stop=True))
    assert len(drawn) == 30


def test_requests_that_do_not_fit_are_refused_and_the_engine_lives_on(plain):
    network, engine = plain
    with pytest.raises(ValueError, match=r"1 to 185 tokens.*Given: 223"):
        engine.generate([[5] * 199], 1, 0)
    with pytest.raises(ValueError, match="an empty prompt"):
        engine.generate([[]], 1, 0)
    with pytest.raises(ConfigError, match="Prompt 1 holds a token"):
        engine.generate([[3, 4], [VOCABULARY]], 1, seed=0)
    assert disagreement(network, engine) < 1e-4


def test_norms_are_replaced_in_place_and_alone(plain):
    network, engine = plain
    noisy = copy.deepcopy(network)
    with torch.no_grad():
        norms = [(name, parameter) for name, parameter in noisy.named_parameters() if "layernorm" in name]
        for _, parameter in norms:
            parameter.add_(0.1 * torch.randn_like(parameter))
    sent = SentLedger(11)
    report = engine.perturb(sent.watch((name, parameter.detach()) for name, parameter in norms), 11)
    assert compare(sent, report.received) == []
    assert engine.generate(prompts(), 1, 0)[0].version == 11
    assert disagreement(noisy, engine) < 1e-4
    assert disagreement(network, engine) > 0.01
    with pytest.raises(ValueError, match="cannot be replaced in place"):
        engine.perturb(iter([("model.layers.0.mlp.up_proj.weight", torch.zeros(384, 128))]), 12)
    publish(network, engine, None, 12)
    assert disagreement(network, engine) < 1e-4


def test_another_format_is_refused(plain):
    network, engine = plain
    with pytest.raises(ValueError, match=r"holds one format\. Expected: plain weights\. Given: fp8_row"):
        publish(network, engine, sampler_format("fp8_row"), 1)
    assert disagreement(network, engine) < 1e-4


def test_a_closed_engine_leaves_nothing_in_memory(monkeypatch):
    # 0.29 logs a traceback (it has no tokenizer to warm up), of which pytest would keep the frames.
    monkeypatch.setattr(logging.getLogger("vllm.renderers.base"), "disabled", True)
    network = tiny_network()
    engine = build_engine(network)
    publish(network, engine, None, 1)
    engine.generate(prompts(), 1, seed=1)
    model = weakref.ref(engine.live.model)
    engine.close()
    assert model() is None
