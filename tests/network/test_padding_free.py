import copy

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Qwen2Config,
    Qwen3MoeConfig,
)

from lit_qrl.network import padding_free
from lit_qrl.network.padding_free import enable_padding_free, flatten, is_padding_free
from lit_qrl.policy import CausalPolicy
from tests.networks import WORDS, batch_of, build_network


def groups(seed=0, prompts=5, size=4, longest=14):
    """A batch of groups: `size` completions of each prompt, of very uneven lengths."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        n = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(2, len(WORDS), (n,), generator=generator).tolist()

    asked = [draw(1, 9) for _ in range(prompts)]
    batch = batch_of([p for p in asked for _ in range(size)], [draw(1, longest) for _ in range(prompts * size)])
    batch.group = torch.arange(prompts).repeat_interleave(size)
    return batch


def policy_of(network):
    """A policy around a network, without a tokenizer."""
    policy = CausalPolicy.__new__(CausalPolicy)
    torch.nn.Module.__init__(policy)
    policy.lora, policy._scoring_with_reference, policy.model = None, False, network
    policy.dropout, policy.head_dtype, policy.batch_invariant = False, None, False
    return policy


def both(network, batch):
    """Log-probs and gradients of the padded and of the packed forward."""
    policy, results = policy_of(network), []
    for prepare in (lambda model: False, enable_padding_free):
        policy.model = copy.deepcopy(network).train()
        assert prepare(policy.model) == is_padding_free(policy.model)
        scores = policy(batch, 0.9, entropy=True)
        weights = torch.linspace(-1, 1, scores.logprobs.numel(), device=scores.logprobs.device).view_as(scores.logprobs)
        (scores.logprobs * weights).sum().backward()
        results.append((scores, [parameter.grad for parameter in policy.parameters()]))
    assert is_padding_free(policy.model)
    return results


def other_prompts():
    """Rows of one group that share nothing."""
    batch = groups()
    batch.group = torch.zeros_like(batch.group)
    own = batch.prompt_length[0] + batch.prompt_length[4:].sum()
    assert len(flatten(batch).tokens) == own + (batch.completion_length - 1).sum()
    return batch


def uncounted():
    """Tokens that do not count and are context all the same."""
    batch = groups()
    batch.mask[:, 1] = False
    batch.mask[3] = False
    return batch


@pytest.mark.parametrize("growth", [1.0, 1.2, 100.0])
@pytest.mark.parametrize("made", [groups, other_prompts, uncounted, lambda: batch_of([[5]], [[3]])])
def test_packed_equals_padded(made, growth, monkeypatch):
    monkeypatch.setattr(padding_free, "BUCKET_GROWTH", growth)
    monkeypatch.setattr(padding_free, "BUCKET_TOKENS", 0)
    batch = made()
    (padded, padded_grads), (packed, packed_grads) = both(build_network(), batch)
    assert (packed.logprobs[~batch.mask] == 0).all()
    for left, right in zip(padded, packed, strict=True):
        torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(padded_grads, packed_grads, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("config_class", "changes"),
    [
        (LlamaConfig, {"attention_bias": True}),
        (Qwen2Config, {}),
        (MistralConfig, {"sliding_window": None}),
        (GraniteConfig, {"attention_multiplier": 0.2, "logits_scaling": 2.0}),
        (Olmo2Config, {}),
        (Qwen3MoeConfig, {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    ],
)
def test_every_listed_architecture(config_class, changes):
    network = build_network(config_class, **changes)
    assert network.config.model_type in padding_free.PLAIN_ATTENTION
    (padded, padded_grads), (packed, packed_grads) = both(network, groups())
    torch.testing.assert_close(padded.logprobs, packed.logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(padded_grads, packed_grads, atol=2e-4, rtol=2e-4)


def test_the_flat_row_holds_every_prompt_once_and_no_padding():
    batch = groups()
    prompts = batch.prompt_length[::4].sum()
    inputs = (batch.completion_length - 1).sum()
    packed = flatten(batch)
    assert len(packed.tokens) == prompts + inputs
    assert (packed.tokens >= 2).all()
    assert torch.equal(packed.positions[: int(batch.prompt_length[0])], torch.arange(int(batch.prompt_length[0])))


def test_a_layout_moves_whole():
    flat = flatten(groups())
    moved = flat.to(torch.device("meta"))
    assert moved.tokens.device.type == moved.buckets[0].device.type == moved.scored[1].device.type == "meta"
    assert moved.attention is None


def test_the_host_lays_out_without_threads():
    """Operations of torch on so few numbers wait for its threads, on a busy host for up to 150 ms a pass."""
    batch, called = groups(), []

    class Called(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            called.append(str(function))
            return function(*args, **(kwargs or {}))

    with Called():
        flatten(batch)
    assert not [name for name in called if any(one in name for one in ("index", "nonzero", "sort", "where", "add"))]


def test_without_a_layout_the_model_computes_as_before():
    network = build_network(LlamaConfig, attention_dropout=0.1)  # which is off
    tokens = torch.tensor([[0, 0, 5, 6, 7], [4, 5, 6, 7, 8]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    with torch.no_grad():
        before = network(tokens, attention_mask=mask).logits
        assert enable_padding_free(network)
        after = network(tokens, attention_mask=mask).logits
    assert torch.equal(before[mask.bool()], after[mask.bool()])


@pytest.mark.parametrize(
    ("config_class", "changes"),
    [
        (Gemma2Config, {}),
        (MistralConfig, {"sliding_window": 4}),
        (LlamaConfig, {"attention_dropout": 0.1}),
        (LlamaConfig, {"attn_implementation": "eager"}),
    ],
)
def test_other_attention_stays_padded(config_class, changes):
    network = build_network(config_class, **changes)
    before = network.config._attn_implementation
    assert not enable_padding_free(network, dropout=True)
    assert network.config._attn_implementation == before
    assert not is_padding_free(network)


def test_buckets_hold_all_rows_and_similar_lengths(monkeypatch):
    monkeypatch.setattr(padding_free, "BUCKET_TOKENS", 0)
    length = np.array([3, 100, 95, 4, 50, 100, 49, 3])
    buckets = padding_free._bucket_rows(length)
    assert sorted(np.concatenate(buckets).tolist()) == list(range(8))
    assert [sorted(length[rows].tolist()) for rows in buckets] == [[95, 100, 100], [49, 50], [4], [3, 3]]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_equals_padded_on_a_gpu(dtype):
    network = build_network(hidden_size=128, head_dim=32).to("cuda", dtype)
    (padded, _), (packed, _) = both(network, groups().to("cuda"))
    tolerance = 1e-4 if dtype == torch.float32 else 0.3
    torch.testing.assert_close(padded.logprobs, packed.logprobs, atol=tolerance, rtol=tolerance)
