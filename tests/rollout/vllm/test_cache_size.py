"""How large a KV cache a run can fill, and where the engine's share has no room for it."""

import pytest
import torch
from transformers import Gemma3TextConfig, Mamba2Config, Qwen2Config

from lit_qrl import formats
from lit_qrl.network.structure import outline
from lit_qrl.rollout.vllm.arguments import sufficient_cache, whole_cache

NETWORK = outline(
    Qwen2Config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
    )
)
NUMBERS = 3 * 2 * 2 * 16
"""Of a token: layers, keys and values, heads, numbers of a head."""
WEIGHTS = 2 * sum(parameter.numel() for parameter in NETWORK.parameters())


def sufficient(total, share=1.0, held=0, monkeypatch=None, format=None, parts=1, **given):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, total))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: held)
    given = {"max_num_seqs": 8, "gpu_memory_utilization": share, **given}
    return sufficient_cache(NETWORK, 200, torch.bfloat16, format, given, parts)


def test_every_sequence_has_whole_blocks_and_one_more():
    assert whole_cache(NETWORK, longest=200, sequences=8, size=2) == 8 * 384 * NUMBERS * 2
    assert whole_cache(NETWORK, longest=256, sequences=8, size=1) == 8 * 384 * NUMBERS
    assert whole_cache(NETWORK, longest=257, sequences=1, size=2, parts=2) == 512 * NUMBERS


@pytest.mark.parametrize(
    "config",
    [
        Mamba2Config(num_hidden_layers=1, hidden_size=16, num_heads=4, head_dim=8, vocab_size=10),
        Gemma3TextConfig(num_hidden_layers=6, hidden_size=16, intermediate_size=16, vocab_size=10, pad_token_id=0),
    ],
)
def test_layers_that_keep_something_else_are_left_to_vllm(config):
    assert whole_cache(outline(config), longest=200, sequences=8, size=2) == 0


def test_a_cache_that_fits_beside_the_weights_is_asked_for(monkeypatch):
    whole = 8 * 384 * NUMBERS * 2
    fits = round((WEIGHTS + whole) / 0.9) + 2
    assert sufficient(fits, monkeypatch=monkeypatch) == whole
    assert sufficient(2 * fits, 0.5, monkeypatch=monkeypatch) == whole
    assert sufficient(fits - 4, monkeypatch=monkeypatch) is None
    assert sufficient(10 * fits, monkeypatch=monkeypatch) == whole  # and no more
    assert sufficient(fits, monkeypatch=monkeypatch, max_num_seqs=9) is None


def test_the_weights_are_those_of_the_format_or_what_the_learner_holds(monkeypatch):
    whole = 8 * 384 * NUMBERS * 2
    fits = round((WEIGHTS / 2 + whole) / 0.9) + 2
    assert sufficient(fits, monkeypatch=monkeypatch) is None
    assert sufficient(fits, monkeypatch=monkeypatch, format=formats.get("fp8_tensor")) == whole
    assert sufficient(fits, monkeypatch=monkeypatch, format=formats.get("fp8_tensor"), held=WEIGHTS) is None
    halves = round((WEIGHTS + whole) / 2 / 0.9) + 2
    assert sufficient(halves, monkeypatch=monkeypatch, parts=2) == whole // 2
