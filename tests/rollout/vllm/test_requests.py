"""Requests as they are ordered and read; nothing here imports vLLM."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lit_qrl.loop.turns import Conversations
from lit_qrl.rollout.vllm.engine import VLLMEngine
from lit_qrl.rollout.vllm.requests import SEED_RANGE, Asked, Routed, answer, check_lengths, request_seed
from lit_qrl.types import SamplingParams
from tests.loop.test_turns import Echo
from tests.vllm_engines import COMPLETION_LIMIT, VOCABULARY, prompts, publish, reference_logprobs, tiny_network


def test_an_empty_prompt_is_refused_and_no_prompt_is_fine():
    with pytest.raises(ValueError, match="an empty prompt"):
        check_lengths([[]], 1, limit=9)
    check_lengths([], 1, limit=1)


def test_what_was_drawn_outlives_a_death_and_no_end():
    engine = VLLMEngine()
    engine._kept = drawn = ("a call", {0: None})
    engine.discard()
    assert engine._kept is drawn
    engine.close()
    assert engine._kept == (None, {})


def test_every_completion_has_a_seed_of_its_own_in_range():
    seeds = [request_seed(seed, row, sample) for seed in (0, 1, 2**40) for row in range(20) for sample in range(20)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < SEED_RANGE for seed in seeds)
    assert request_seed(3, 4, 5) == request_seed(3, 4, 5)


@pytest.mark.parametrize(("reason", "expected"), [("stop", "stop"), ("length", "length"), ("abort", "length")])
def test_a_completion_is_read_with_its_version(reason, expected):
    drawn = SimpleNamespace(token_ids=(4, 5), logprobs=SimpleNamespace(logprobs=[-0.5, -1.0]), finish_reason=reason)
    got = answer(Asked(0, [3], SamplingParams()), SimpleNamespace(outputs=[drawn]), 7)
    assert (got.token_ids, got.logprobs, got.finish_reason, got.version) == ([4, 5], [-0.5, -1.0], expected, 7)
    assert got.routed_experts is None


def routes_read(given, experts=8, chosen=2, layers=(1, 2), prompt=2):
    """What is read of a request with two drawn tokens, for whose tokens vLLM reports `given`."""
    drawn = SimpleNamespace(token_ids=(4, 5), logprobs=SimpleNamespace(logprobs=[0, 0]), finish_reason="stop")
    drawn.routed_experts = given
    output = SimpleNamespace(outputs=[drawn], prompt_token_ids=[7] * prompt)
    return answer(Asked(0, [3], SamplingParams()), output, 0, Routed(layers, experts, chosen)).routed_experts


@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
def test_routes_are_of_layers_with_experts_and_the_last_token_has_none(dtype):
    given = np.arange(3 * 3 * 2).reshape(3, 3, 2) % 7  # a dense layer first
    got = routes_read(given.astype(dtype))
    assert got.dtype == torch.uint8
    assert torch.equal(got[:3], torch.tensor(given[:, 1:], dtype=torch.uint8))
    assert (got[3] == 255).all()
    assert routes_read(None) is None


def test_a_token_that_was_not_recorded_is_lost_and_not_sent_to_expert_0():
    given = np.array([[[1, 2]], [[0, 0]], [[3, 0]]], np.uint8)
    got = routes_read(given, layers=(0,))
    assert got.flatten(1).tolist() == [[1, 2], [255, 255], [3, 0], [255, 255]]
    assert routes_read(given[:2], layers=(0,)).flatten(1).tolist()[2] == [255, 255]  # fewer than there are tokens
    assert routes_read(given[:, :, :1], layers=(0,), chosen=1).flatten().tolist() == [1, 0, 3, 255]


def test_numbers_of_many_experts_take_two_bytes():
    got = routes_read(np.array([[[255, 0]]], np.uint8), experts=256, layers=(0,), prompt=0)
    assert got.dtype == torch.int16
    assert got[:, 0].tolist() == [[255, 0], [32767, 32767]]


@pytest.mark.vllm
def test_turns_of_many_conversations_interleave_and_are_scored_over_the_whole_sequence(built):
    network = tiny_network()
    engine = built(network)
    publish(network, engine, None, 0)
    sampling = SamplingParams(stop_token_ids=tuple(range(0, VOCABULARY, 4)))
    starts = prompts(count=6, length=20)
    drawn = []
    for _ in range(2):
        with Conversations(
            Echo(), [{"says": ["", ""]}] * 6, starts, lambda said: [7], str, COMPLETION_LIMIT, seed=3
        ) as talks:
            engine.converse(talks, sampling)
        drawn.append(talks.completions())
    first, again = drawn
    assert [one.token_ids for one in first] == [one.token_ids for one in again]
    assert max(one.episode.turns for one in first) == 3
    for prompt, one in zip(starts, first, strict=True):
        expected = reference_logprobs(network, prompt, one.token_ids)
        mask = torch.tensor(one.drawn)
        torch.testing.assert_close(torch.tensor(one.logprobs)[mask], expected[mask], atol=1e-4, rtol=0)
        assert (~mask).sum() == one.episode.turns - 1 or one.episode.ended == "length"
        assert one.version == 0
