from pathlib import Path

import pytest
import torch
from transformers import PreTrainedConfig

from lit_qrl.rollout.engine import SamplerSpec
from lit_qrl.rollout.vllm.arguments import llm_arguments
from lit_qrl.rollout.vllm.engine import VLLMEngine

NETWORK = torch.nn.Module()
NETWORK.config = PreTrainedConfig()


@pytest.fixture(autouse=True)
def without_states(monkeypatch):
    """vLLM's own registry would be asked."""
    monkeypatch.setattr("lit_qrl.rollout.vllm.arguments.recurrent", lambda name: False)


def arguments(spec=None, given=None, **options):
    engine = VLLMEngine(engine_args=given, **options)
    engine.describe(spec or SamplerSpec(), NETWORK)
    return llm_arguments(engine, Path("here"), torch.float32, 99)


def test_what_the_user_gives_goes_before_what_is_usual():
    made = arguments(given={"disable_log_stats": False, "seed": 3})
    assert (made["disable_log_stats"], made["seed"], made["max_model_len"]) == (False, 3, 99)
    assert made["logprobs_mode"] == "processed_logprobs"


def test_log_probs_of_all_words_may_be_asked_for_where_the_kept_ones_are_recorded():
    assert "max_logprobs" not in arguments()
    assert arguments(SamplerSpec(kept=True), {"max_logprobs": 5})["max_logprobs"] == -1


@pytest.mark.parametrize("on_gpu", [True, False])
def test_what_is_for_a_gpu_alone(on_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    made = arguments(SamplerSpec(routes=True), kv_cache_gib=0.5, sleep_level=1)
    asked = {"kv_cache_memory_bytes": 2**29, "enable_sleep_mode": True, "enable_return_routed_experts": True}
    assert {name: made.get(name) for name in asked} == (asked if on_gpu else dict.fromkeys(asked))


@pytest.mark.parametrize(
    ("given", "options", "wanted"),
    [
        ({}, {}, 7),
        ({}, {"kv_cache_gib": 1}, 2**30),
        ({"kv_cache_memory_bytes": 5}, {}, 5),
        ({"kv_cache_memory_bytes": 5}, {"kv_cache_gib": 1}, 5),
        ({"num_gpu_blocks_override": 3}, {}, None),
    ],
)
def test_a_cache_that_nobody_sizes_is_as_large_as_can_be_filled(given, options, wanted, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("lit_qrl.rollout.vllm.arguments.sufficient_cache", lambda *rest: 7)
    assert arguments(given=given, **options).get("kv_cache_memory_bytes") == wanted
    monkeypatch.setattr("lit_qrl.rollout.vllm.arguments.sufficient_cache", lambda *rest: None)
    assert ("kv_cache_memory_bytes" in arguments()) is False
