import logging

import pytest
import torch
from transformers import Gemma2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from lit_qrl import formats
from lit_qrl.rollout.embedded.decode import Decoder
from lit_qrl.rollout.embedded.engine import unfit
from lit_qrl.rollout.engine import EngineDiedError
from lit_qrl.types import SamplingParams
from tests.networks import build_network
from tests.rollout.embedded.test_engine import EOS, PROMPTS, check_log_probs, engine_of, scored_apart
from tests.routes import build_mixture


def check_same(found, expected, atol=1e-5):
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert [one.finish_reason for one in found] == [one.finish_reason for one in expected]
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(left.logprobs), torch.tensor(right.logprobs), atol=atol, rtol=0)


@pytest.mark.parametrize(
    ("config_class", "changes"),
    [
        (LlamaConfig, {"attention_bias": True, "tie_word_embeddings": False}),
        (Qwen2Config, {}),
        (Qwen3Config, {"num_key_value_heads": 4}),
        (MistralConfig, {"sliding_window": None}),
    ],
)
def test_families_draw_the_same_in_slots(config_class, changes):
    network = build_network(config_class, **changes)
    engine = engine_of(network, cuda_graphs=True, max_batch=5)
    assert engine.continuous
    found = engine.generate(PROMPTS, 4, seed=1)
    check_same(found, engine_of(network, cuda_graphs=False).generate(PROMPTS, 4, seed=1))
    check_log_probs(network, PROMPTS, found, 4)


def quantized(name, **options):
    network = build_network(hidden_size=64, head_dim=16, intermediate_size=128)
    return engine_of(network, formats.get(name), **options)


def test_a_format_of_weights_draws_the_same_in_slots():
    expected = quantized("nvfp4").generate(PROMPTS, 4, seed=1)
    check_same(quantized("nvfp4", cuda_graphs=True, max_batch=7).generate(PROMPTS, 4, seed=1), expected)


def test_a_format_of_activations_agrees_with_the_scores_in_slots():
    engine = quantized("fp8_row", cuda_graphs=True, max_batch=7)
    assert scored_apart(engine, engine.generate(PROMPTS, 4, seed=1), 4) < 0.01  # last bits become steps of E4M3


@pytest.mark.parametrize(
    ("network", "why"),
    [
        (build_network(Gemma2Config, sliding_window=4), "gemma2"),
        (build_network(MistralConfig, sliding_window=4), "window"),
        (build_network(attn_implementation="eager"), "eager"),
        (build_mixture(), "experts"),
        (build_network(rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}), "rotary"),
    ],
)
def test_what_does_not_decode_in_slots_says_so_once_and_draws_as_before(network, why, caplog):
    with caplog.at_level(logging.INFO, logger="lit_qrl"):
        engine = engine_of(network, cuda_graphs=True)
    assert why in unfit(engine.network)
    assert caplog.text.count("without CUDA graphs") == 1
    assert why in caplog.text
    first = engine.generate(PROMPTS, 3, seed=1)
    assert caplog.text.count("without CUDA graphs") == 1
    assert first == engine_of(network, cuda_graphs=False).generate(PROMPTS, 3, seed=1)


def test_batch_invariant_runs_keep_their_promise(caplog):
    network = build_network()
    engine = engine_of(network, cuda_graphs=True, batch_invariant=True)
    assert not engine.continuous
    assert "batch_invariant is on" in caplog.text
    alone = engine.generate(PROMPTS[:1], 3, seed=1)
    assert engine.generate(PROMPTS, 3, seed=1)[:3] == alone


def test_it_is_left_to_gpus_where_it_is_left_open():
    assert not engine_of(build_network(), cuda_graphs="auto").continuous


def test_a_call_that_memory_does_not_do_for_is_drawn_in_fewer_slots(monkeypatch, caplog):
    network = build_network()
    engine = engine_of(network, cuda_graphs=True)
    allocate, asked = Decoder._allocate, []

    def short(self, rows, slots):
        asked.append(slots)
        if slots > 4:
            raise MemoryError
        return allocate(self, rows, slots)

    monkeypatch.setattr(Decoder, "_allocate", short)
    found = engine.generate(PROMPTS, 4, seed=1)
    assert asked == [16, 8, 4]
    engine.generate(PROMPTS, 4, seed=1)
    assert asked[3:] == [4]
    monkeypatch.setattr(Decoder, "_allocate", allocate)
    check_same(found, engine_of(network).generate(PROMPTS, 4, seed=1))
    monkeypatch.setattr(Decoder, "_allocate", lambda self, rows, slots: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(EngineDiedError, match="one sequence"):
        engine.generate(PROMPTS, 4, seed=1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        (None, {}),
        (None, {"top_p": 0.9, "top_k": 12, "temperature": 0.8}),
        (None, {"temperature": 0.0}),
        ("fp8_row", {}),
        ("nvfp4", {}),
    ],
)
def test_replayed_steps_draw_what_launched_ones_draw(name, sampling, caplog, monkeypatch):
    from lit_qrl.rollout import graphs

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
    network = build_network(Qwen3Config, dtype=torch.bfloat16, gain=1, norm=0.05, **sizes).cuda()
    params = SamplingParams(**{"max_tokens": 40, "stop_token_ids": (EOS,), **sampling})
    format = name and formats.get(name)
    replayed = engine_of(network, format, params, cuda_graphs=True, max_batch=12)
    found = replayed.generate(PROMPTS, 8, seed=5)
    assert replayed.trust.checked
    assert not replayed.trust.broken, caplog.text
    check_same(replayed.generate(PROMPTS, 8, seed=5), found, atol=1e-6)

    def refuse(*args):
        raise RuntimeError("not recorded")

    monkeypatch.setattr(graphs, "record", refuse)
    launched = engine_of(network, format, params, cuda_graphs=True, max_batch=12)
    check_same(launched.generate(PROMPTS, 8, seed=5), found, atol=1e-6)
    assert launched.trust.broken
    old = engine_of(network, format, params, max_batch=12).generate(PROMPTS, 8, seed=5)
    # Where bf16 rounds otherwise, a token at an edge may differ, and all after it.
    first = [left.token_ids[0] == right.token_ids[0] for left, right in zip(found, old, strict=True)]
    assert sum(first) >= 0.9 * len(first)
    if "top_p" not in sampling:
        assert scored_apart(replayed, found, 8) < 0.03


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_steps_under_the_learners_autocast_are_recorded_and_have_its_log_probs(dtype, caplog):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
    network = build_network(Qwen3Config, gain=1, norm=0.05, **sizes).cuda()
    sampling = SamplingParams(max_tokens=40, stop_token_ids=(EOS,))
    engine = engine_of(network, None, sampling, {"compute_dtype": dtype}, cuda_graphs=True, max_batch=12)
    handed = []
    found = engine.generate(PROMPTS, 8, seed=5, finished=lambda some: handed.append(dict(some)))
    assert engine.trust.checked
    assert not engine.trust.broken, caplog.text
    with torch.autocast("cuda", dtype):
        assert engine.generate(PROMPTS, 8, seed=5) == found
    assert len(handed) > 1  # some ended while others were drawn
    assert all(one == found[number] for some in handed for number, one in some.items())

    def apart(enabled):
        off = []
        for i, one in enumerate(found):
            ids = torch.tensor([[*PROMPTS[i // 8], *one.token_ids]]).cuda()
            with torch.no_grad(), torch.autocast("cuda", dtype, enabled=enabled):
                own = network(ids).logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            off.append((own[len(PROMPTS[i // 8]) - 1 :].cpu() - torch.tensor(one.logprobs)).abs())
        return torch.cat(off).mean()

    assert apart(True) < 0.7 * apart(False)
