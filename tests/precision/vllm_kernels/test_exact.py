"""How the learner calls the kernels of vLLM's batch-invariant mode; that the bits agree needs a GPU."""

import copy
import sys
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from torch.nn import functional as F

from lit_qrl.precision.vllm_kernels.exact import VLLMKernels

CALLS: dict[str, dict] = {}


def attend(q, k, v, **options):
    """Causal attention over sequences one behind the other, as flash-attn's function for such, and its sums."""
    CALLS["attention"] = options
    sums = []
    k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for one in (k, v))
    out = []
    for start, end in pairwise(options["cu_seqlens_q"]):
        heads = [one[start:end].transpose(0, 1) for one in (q, k, v)]
        found = F.scaled_dot_product_attention(*heads, is_causal=True, scale=options["softmax_scale"])
        out.append(found.transpose(0, 1))
        scores = heads[0] @ heads[1].transpose(1, 2) * options["softmax_scale"]
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        sums.append(scores.masked_fill(later, -torch.inf).logsumexp(dim=-1))
    return torch.cat(out), torch.cat(sums, dim=1)


def turn(positions, query, key, size, cosines, neox):
    """As vLLM's operator, in place."""
    assert neox
    cos, sin = (one[:, None] for one in cosines[positions].chunk(2, dim=-1))
    for x in (query, key):
        heads = x.view(len(x), -1, size)
        first, second = heads.clone().chunk(2, dim=-1)
        heads.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    """vLLM's modules, as far as they are called, with torch's arithmetic."""
    layers, operators, flash = (ModuleType(name) for name in ("batch_invariant", "_custom_ops", "vllm_flash_attn"))
    layers.linear_batch_invariant = F.linear
    layers.log_softmax = lambda x: F.log_softmax(x, dim=-1)
    operators.rotary_embedding = turn
    flash.flash_attn_varlen_func = attend
    package = ModuleType("vllm")
    package._custom_ops = operators
    CALLS.clear()
    for name, module in (
        ("vllm", package),
        ("vllm._custom_ops", operators),
        ("vllm.vllm_flash_attn", flash),
        ("vllm.model_executor", ModuleType("model_executor")),
        ("vllm.model_executor.layers", ModuleType("layers")),
        ("vllm.model_executor.layers.batch_invariant", layers),
    ):
        monkeypatch.setitem(sys.modules, name, module)


def kernels() -> VLLMKernels:
    angles = torch.arange(9)[:, None] * torch.tensor([1.0, 0.1])
    return VLLMKernels(torch.cat((angles.cos(), angles.sin()), dim=-1))


def test_attention_is_of_whole_sequences_with_one_split_of_the_keys():
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 8)
    out = kernels().attention(query, key, value, 0.5)
    options = CALLS["attention"]
    assert options["cu_seqlens_q"].tolist() == options["cu_seqlens_k"].tolist() == [0, 5, 10]
    assert options["cu_seqlens_q"].dtype == torch.int32
    assert (options["num_splits"], options["causal"], options["fa_version"]) == (1, True, 3)
    heads = [one.transpose(1, 2) for one in (query, key, value)]
    expected = F.scaled_dot_product_attention(*heads, is_causal=True, scale=0.5, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(out, expected)


def test_rotation_leaves_its_inputs_alone_and_keeps_lengths():
    query, key, positions = torch.randn(3, 2, 4), torch.randn(3, 1, 4), torch.tensor([0, 4, 8])
    given = query.clone(), key.clone()
    q, k = kernels().rotate(query, key, positions)
    assert query.equal(given[0])
    assert key.equal(given[1])
    assert q[0].equal(query[0])
    assert not q[1].equal(query[1])
    torch.testing.assert_close(torch.cat((q, k), 1).norm(dim=-1), torch.cat((query, key), 1).norm(dim=-1))


def test_the_rest_are_the_modes_own_functions():
    x, weight, own = torch.randn(3, 4), torch.randn(5, 4), kernels()
    assert own.linear(x, weight, None).equal(F.linear(x, weight))
    tokens = torch.tensor([1, 0, 3])
    assert own.logprobs(x, tokens).equal(F.log_softmax(x, dim=-1)[torch.arange(3), tokens])
    assert copy.deepcopy(own) is own


def test_gate_and_up_are_laid_beside_each_other(monkeypatch):
    def silu_and_mul(out, both):
        out.copy_(F.silu(both[:, :4]) * both[:, 4:])

    monkeypatch.setattr(torch.ops, "_C", ModuleType("operators"))
    torch.ops._C.silu_and_mul = silu_and_mul
    gate, up = torch.randn(3, 4), torch.randn(3, 4)
    assert kernels().gate(gate, up).equal(F.silu(gate) * up)
