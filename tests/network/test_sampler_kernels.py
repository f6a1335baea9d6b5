"""Tests of a decoder computed by the kernels of its sampler: the same numbers, the usual gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from lit_qrl.network.invariant import batch_invariant
from lit_qrl.network.sampler_kernels import adopt

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
    found = torch.autograd.grad(own.square().sum(), weights)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
