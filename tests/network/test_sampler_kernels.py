"""Tests of a decoder computed by the kernels of its sampler: the same numbers, the usual gradients."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, DynamicCache, GPT2Config, LlamaConfig, Qwen2Config, Qwen3Config

from lit_qrl.errors import ConfigError
from lit_qrl.functional.logprobs import token_logprobs
from lit_qrl.network.hidden import recomputation, scored_hidden
from lit_qrl.network.invariant import batch_invariant
from lit_qrl.network.padding_free import enable_padding_free
from lit_qrl.network.sampler_kernels import adopt, check_decoder, kernels_adopted
from lit_qrl.network.structure import cached
from lit_qrl.types import RolloutBatch

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64, "initializer_range": 0.2}
CONFIGS = (LlamaConfig(**SIZES), Qwen2Config(**SIZES), Qwen3Config(**SIZES, head_dim=8))


class Recorded:
    """Kernels written out from their definitions, and which were called."""

    name = "the test"

    def __init__(self, base: float = 10000.0) -> None:
        self.called: set[str] = set()
        self.base = base

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self.called.add("linear")
        out = x @ weight.t()
        return out if bias is None else out + bias

    def attention(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        self.called.add("attention")
        groups = query.shape[2] // key.shape[2]
        key, value = (one.repeat_interleave(groups, dim=2) for one in (key, value))
        scores = torch.einsum("bnhd,bmhd->bhnm", query, key) * scale
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return torch.einsum("bhnm,bmhd->bnhd", scores.masked_fill(later, -torch.inf).softmax(dim=-1), value)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        self.called.add("norm")
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight

    def rotate(self, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        self.called.add("rotate")
        d = query.shape[-1]
        angles = positions[:, None] * self.base ** (-torch.arange(0, d, 2) / d)
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]

        def turned(x: Tensor) -> Tensor:
            first, second = x.chunk(2, dim=-1)
            out = torch.complex(first, second) * turn
            return torch.cat((out.real, out.imag), dim=-1)

        return turned(query), turned(key)

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        self.called.add("gate")
        return gate * torch.sigmoid(gate) * up

    def logprobs(self, scores: Tensor, tokens: Tensor) -> Tensor:
        self.called.add("logprobs")
        return scores.log_softmax(dim=-1).gather(-1, tokens[:, None])[:, 0]


def small(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def logits(network: Any, tokens: Tensor, kernels: Recorded | None) -> Tensor:
    with batch_invariant(kernels is not None, kernels):
        return network(input_ids=tokens, use_cache=False).logits


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_kernels_that_compute_the_same_give_the_models_own_logits_and_gradients(config: Any):
    network, tokens = small(config), torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(1))
    usual = logits(network, tokens, None)
    weights = list(network.parameters())
    expected = torch.autograd.grad(usual.square().sum(), weights)
    kernels = Recorded()
    adopt(network, kernels)
    own = logits(network, tokens, kernels)
    assert kernels.called == {"linear", "attention", "norm", "rotate", "gate"}
    assert not own.equal(usual)  # in another order of the sums
    torch.testing.assert_close(own, usual, rtol=1e-4, atol=1e-4)
    cache = DynamicCache()
    first = network(tokens[:, :5], **cached(network, cache)).logits  # outside of the mode, as a probe may
    rest = network(tokens[:, 5:], **cached(network, cache)).logits
    torch.testing.assert_close(torch.cat([first, rest], dim=1), usual, rtol=1e-4, atol=1e-4)
    found = torch.autograd.grad(own.square().sum(), weights)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_packed_rows_attend_by_the_kernel_and_a_copy_computes_with_its_own_weights():
    network, kernels = small(CONFIGS[2]), Recorded()
    assert enable_padding_free(network)
    adopt(network, kernels)
    assert kernels_adopted(network) is kernels
    copied = copy.deepcopy(network)
    batch = sequences()
    with batch_invariant(True, kernels), torch.no_grad():
        before = scored_hidden(network, batch).states
        assert kernels.called >= {"attention", "rotate"}
        for parameter in network.parameters():
            parameter.mul_(2)
        assert scored_hidden(copied, batch).states.equal(before)
        assert not scored_hidden(network, batch).states.equal(before)
    assert type(network.model.norm).__name__ == "Qwen3RMSNorm"
    assert network.state_dict().keys() == small(CONFIGS[2]).state_dict().keys()


def sequences() -> Any:
    """Two prompts of 3 tokens with two completions of 4 each."""
    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(2, 64, (2, 3), generator=generator).repeat_interleave(2, dim=0)
    tokens = torch.cat((prompts, torch.randint(2, 64, (4, 4), generator=generator)), dim=1)
    zeros, mask = torch.zeros(4, dtype=torch.long), torch.ones(4, 4, dtype=torch.bool)
    return RolloutBatch(
        tokens=tokens, prompt_length=zeros + 3, mask=mask, sampler_logprobs=mask.float(), rewards=zeros.float(),
        advantages=zeros.float(), group=torch.tensor([0, 0, 1, 1]), version=zeros, stopped=zeros.bool(),
    )  # fmt: skip


def test_gradient_checkpointing_computes_again_by_the_same_kernels():
    network, kernels = small(CONFIGS[0]), Recorded()
    adopt(network, kernels)
    tokens = torch.randint(64, (1, 6), generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad(logits(network, tokens, kernels).sum(), network.lm_head.weight)
    network.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": recomputation})
    network.train()
    out = logits(network, tokens, kernels)
    kernels.called.clear()
    found = torch.autograd.grad(out.sum(), [network.lm_head.weight, network.model.embed_tokens.weight])
    assert kernels.called >= {"linear", "attention", "norm", "rotate", "gate"}
    assert found[0].equal(expected[0])
    assert found[1].abs().sum() > 0


def test_the_kernel_of_the_log_probs_is_the_policys_too():
    scores, tokens = torch.randn(3, 5), torch.tensor([1, 0, 4])
    picked = Recorded().logprobs(2 * scores, tokens)
    out, _ = token_logprobs(scores, 2 * torch.eye(5), tokens, pick=lambda z, y: z.gather(1, y[:, None])[:, 0])
    assert out.equal(2 * scores.gather(1, tokens[:, None])[:, 0])
    usual, _ = token_logprobs(scores, 2 * torch.eye(5), tokens)
    torch.testing.assert_close(usual, picked)


@pytest.mark.parametrize(
    ("config", "given"),
    [
        (GPT2Config(), "model_type gpt2"),
        (Qwen2Config(**SIZES, use_sliding_window=True, max_window_layers=1), "layers of full_attention, sliding"),
        (LlamaConfig(**SIZES, mlp_bias=True), "mlp_bias"),
        (LlamaConfig(**SIZES, hidden_act="gelu"), "hidden_act gelu"),
        (LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}), "linear"),
    ],
)
def test_another_kind_of_decoder_is_refused_by_what_it_has(config, given):
    with pytest.raises(ConfigError, match=f"with the kernels of vLLM.*Given: .*{given}"):
        check_decoder(config, "vLLM")
    check_decoder(CONFIGS[0], "vLLM")


def test_another_attention_is_refused():
    network = small(CONFIGS[0])
    network.set_attn_implementation("eager")
    with pytest.raises(ConfigError, match=r"kernel of the test.*sdpa.*Given: eager"):
        adopt(network, Recorded())


def test_masked_attention_is_refused():
    kernels, heads = Recorded(), torch.randn(1, 2, 3, 4)
    with batch_invariant(True, kernels), pytest.raises(ConfigError, match="masked or has dropout"):
        F.scaled_dot_product_attention(heads, heads, heads, attn_mask=torch.ones(3, 3, dtype=torch.bool))
