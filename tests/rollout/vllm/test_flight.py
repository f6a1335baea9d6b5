"""Weights between two steps of vLLM: each token's log-prob is that of the weights that the engine says drew it."""

from types import SimpleNamespace

import pytest
import torch

from lit_qrl.errors import ConfigError
from lit_qrl.rollout.engine import SamplerSpec
from lit_qrl.rollout.vllm.flight import Flight, check, flight_of
from lit_qrl.rollout.vllm.requests import own_of
from tests.rollout.embedded.test_flight import after, expected
from tests.vllm_engines import build_engine, prompts, publish, tiny_network


def engine_at(version=0):
    return SimpleNamespace(version=version, between_steps=None)


def llm_with(**drawn):
    """What `Flight` asks of vLLM: its unfinished requests, of which one has ended."""
    under_way = {
        f"{number[1:]}-abc": SimpleNamespace(num_output_tokens=count, is_finished=lambda: False)
        for number, count in drawn.items()
    }
    under_way["9-abc"] = SimpleNamespace(num_output_tokens=3, is_finished=lambda: True)
    scheduler, resets = SimpleNamespace(requests=under_way), []
    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
    reset = lambda reset_running_requests=False: resets.append(reset_running_requests) or True  # noqa: E731
    return SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core), reset_prefix_cache=reset, resets=resets)


@pytest.mark.parametrize("recompute", [False, True])
def test_tokens_are_of_the_version_that_was_there_when_they_were_drawn(recompute):
    flight = Flight(engine_at(4), recompute)
    flight.begin()
    llm = llm_with(r0=2, r1=0)
    assert flight.came(llm, 5) is True
    assert llm.resets == [True] * recompute
    assert flight.stale is not recompute
    assert flight.came(llm_with(r0=3), 6) is True
    assert flight.versions(0, 5) == [4, 4, 5, 6, 6]
    assert flight.versions(1, 2) == [5, 5]
    assert flight.versions(2, 2) == [4, 4]
    flight.begin()
    assert flight.versions(0, 2) == [4, 4]
    assert flight.came(llm_with(), 7) is None  # nothing runs: all of the cache can be emptied


def test_outputs_of_an_interrupted_call_are_kept_for_it():
    flight = Flight(engine_at(), recompute=False)
    assert own_of([(0, "outer"), (7, "inner")], {7}, flight) == [(7, "inner")]
    assert own_of([(1, "later")], {0, 1}, flight) == [(0, "outer"), (1, "later")]
    assert flight.strays == {}


def test_without_updates_nothing_is_looked_at():
    assert flight_of(engine_at(), "none") is None
    assert flight_of(engine_at(), "recompute").recompute


@pytest.mark.parametrize(
    ("options", "cache", "speculative", "named"),
    [
        ({"routes": True}, "auto", False, "RouterReplay"),
        ({"adapter": object()}, "auto", False, "publisher.lora to merged"),
        ({}, "fp8", False, "kv_cache_dtype: fp8"),
        ({}, "auto", True, "data.engine.speculative"),
    ],
)
def test_what_is_not_known_to_be_right_is_refused(options, cache, speculative, named):
    with pytest.raises(ConfigError, match=named):
        check(SamplerSpec(in_flight="keep", **options), cache, speculative)
    check(SamplerSpec(**options), cache, speculative)


def near(completion, reference):
    """Whether log-probs are those of the reference, up to what the engine's dtype rounds."""
    off = (torch.tensor(completion.logprobs) - reference).abs()
    return bool(off.mean() < 0.03 if torch.cuda.is_available() else off.max() < 1e-4)


@pytest.mark.vllm
@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_both_parts_of_a_completion_have_the_log_probs_of_their_own_weights(mode):
    old = tiny_network()
    new = tiny_network()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    on_gpu = torch.cuda.is_available()  # whose attention takes 16 bits
    options = {"gpu_memory_utilization": 0.1, "kv_cache_gib": 1.0, "quick_start": True} if on_gpu else {}
    engine = build_engine(old, spec={"in_flight": mode}, dtype="bf16" if on_gpu else "fp32", max_num_seqs=4, **options)
    try:
        assert publish(old, engine, None, 0)[0] == []
        asked = prompts(4)
        scored = []

        def come():
            assert publish(new, engine, None, 1)[0] == []
            scored.extend(engine.score(asked[:1]))  # as a probe does, beside requests that go on

        engine.between_steps = after(6, come)
        drawn = engine.generate(asked, 2, 7)
        crossed = [(i, one) for i, one in enumerate(drawn) if one.versions is not None]
        assert len(crossed) == 4  # max_num_seqs: the rest began with the new weights
        for i, one in crossed:
            assert near(one, expected(asked[i // 2], one, old, new, mode))
            assert not near(one, expected(asked[i // 2], one, old, old, mode))
        assert {one.version for one in drawn if one.versions is None} == {1}
        assert len(scored[0]) == len(asked[0]) - 1
        # What comes later finds nothing of the old weights in the cache.
        engine.between_steps = None
        fresh = engine.generate(asked, 1, 9)
        with torch.no_grad():
            for prompt, one in zip(asked, fresh, strict=True):
                tokens = torch.tensor([[*prompt, *one.token_ids]])
                logits = new(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(dim=-1)
                reference = logits.gather(1, tokens[0, len(prompt) :, None])[:, 0]
                assert near(one, reference)
    finally:
        engine.close()
