from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig

from lit_qrl.errors import ConfigError
from lit_qrl.network.invariant import (
    KEYS,
    PIECE,
    ROWS,
    BatchInvariant,
    as_entered,
    batch_invariant,
    check_invariant,
    invariant_attention,
    invariant_linear,
    one_by_one,
)
from tests.networks import build_network


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, ROWS - 1, ROWS, 3 * ROWS + 5])
def test_a_row_of_a_product_is_the_same_alone_and_among_others(rows, dtype):
    torch.manual_seed(rows)
    x, weight, bias = torch.randn(rows, 96).to(dtype), torch.randn(40, 96).to(dtype), torch.randn(40).to(dtype)
    out = invariant_linear(x, weight, bias)
    assert all(torch.equal(invariant_linear(x[i], weight, bias), out[i]) for i in (0, rows // 2, rows - 1))
    expected = x.double() @ weight.double().T + bias.double()
    assert (out.double() - expected).abs().max() <= (1e-4 if dtype == torch.float32 else 0.25)


def test_gradients_of_a_product_are_those_of_the_plain_one():
    torch.manual_seed(0)
    inputs = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 70, 8), (5, 8), (5,))]
    upstream = torch.randn(3, 70, 5, dtype=torch.float64)
    found = torch.autograd.grad(invariant_linear(*inputs), inputs, upstream)
    wanted = torch.autograd.grad(F.linear(*inputs), inputs, upstream)
    torch.testing.assert_close(found, wanted)


def scores_by_hand(q, k, v, scale):
    """Causal attention of one head in fp64, one query at a time."""
    rows = []
    for i in range(len(q)):
        shares = ((k[: i + 1].double() @ q[i].double()) * scale).softmax(0)
        rows.append(shares @ v[: i + 1].double())
    return torch.stack(rows)


@pytest.mark.parametrize("length", [1, 7, KEYS, 2 * KEYS + 3])
def test_attention_is_softmax_of_scores_and_the_last_query_the_same_alone(length):
    torch.manual_seed(length)
    q, k, v = torch.randn(2, 4, length, 8), torch.randn(2, 2, length, 8), torch.randn(2, 2, length, 8)
    out = invariant_attention(q, k, v, is_causal=True)
    for b, head in ((0, 0), (1, 3)):
        wanted = scores_by_hand(q[b, head], k[b, head // 2], v[b, head // 2], 8**-0.5)
        assert (out[b, head].double() - wanted).abs().max() < 1e-5
    folded = q[:, :, -1:].reshape(2, 2, 2, 8)  # as decoding lays it out: the heads of a key head are rows
    assert torch.equal(invariant_attention(folded, k, v).reshape(2, 4, 8), out[:, :, -1])
    wide = torch.cat([k, torch.randn(2, 2, 9, 8)], 2), torch.cat([v, torch.randn(2, 2, 9, 8)], 2)
    mask = torch.arange(length + 9) < length
    assert torch.equal(invariant_attention(q[:, :, -1:], *wide, attn_mask=mask), out[:, :, -1:])


def test_gradients_of_attention_are_those_of_the_library():
    torch.manual_seed(0)
    inputs = [torch.randn(2, heads, 20, 8, requires_grad=True) for heads in (4, 2, 2)]
    upstream = torch.randn(2, 4, 20, 8)
    found = torch.autograd.grad(invariant_attention(*inputs, is_causal=True, scale=0.3), inputs, upstream)
    q, k, v = inputs
    plain = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(found, torch.autograd.grad(plain, inputs, upstream))


def test_a_mask_of_numbers_is_refused():
    x = torch.ones(1, 1, 1, 2)
    with pytest.raises(TypeError, match="True and False"):
        invariant_attention(x, x, x, attn_mask=torch.zeros(1, 1))


def test_the_mode_replaces_products_and_nothing_stays_behind():
    torch.manual_seed(0)
    x, weight = torch.randn(300, 96), torch.randn(40, 96)
    with batch_invariant(True):
        assert torch.equal(x @ weight.T, torch.cat([x[:7] @ weight.T, F.linear(x[7:], weight)]))
        assert torch.equal(torch.mm(x, weight.T), x.matmul(weight.T))
        again = as_entered()
    assert isinstance(again, BatchInvariant)
    assert not isinstance(as_entered(), BatchInvariant)
    with batch_invariant(False):
        assert torch.equal(x @ weight.T, F.linear(x, weight))


def test_an_engines_product_takes_the_place_of_every_product_with_a_weight_and_of_nothing_else():
    def product(x, weight, bias):
        asked.append(len(x))
        out = x @ weight.t()
        return out if bias is None else out + bias

    asked = []
    x, weight, bias = (torch.randn(one, requires_grad=True) for one in ((2, 3, 8), (5, 8), (5,)))
    rows = x.flatten(0, 1)
    calls = (
        lambda: F.linear(x, weight, bias),
        lambda: x @ weight.t(),
        lambda: torch.mm(rows, weight.t()),
        lambda: torch.addmm(bias, rows, weight.t()),
    )
    for call in calls:
        expected = call()
        wanted = torch.autograd.grad(expected.square().sum(), (x, weight))
        with batch_invariant(True, product):
            assert not one_by_one()  # fused kernels stay: they are the engine's too
            found = call()
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found.square().sum(), (x, weight)), wanted)
    assert asked == [6, 6, 6, 6]
    with batch_invariant(True, product):
        assert (x @ x.transpose(1, 2)).shape == (2, 3, 3)
        again = as_entered()
    with again:
        F.linear(x, weight)
    assert asked == [6, 6, 6, 6, 6]
    with batch_invariant(True):
        assert one_by_one()


def test_products_of_two_activations_and_dropout_are_refused():
    x = torch.ones(2, 1, 3, 3)
    with batch_invariant(True):
        for forbidden in (lambda: x @ x, lambda: torch.bmm(x[0], x[0]), lambda: torch.einsum("...ij->...ji", x)):
            with pytest.raises(ConfigError, match="no batch-invariant kernel"):
                forbidden()
        with pytest.raises(ConfigError, match="dropout"):
            F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)
        assert torch.equal(x[..., :1] @ x[..., :1, :], x)


@pytest.mark.parametrize("function", [F.silu, F.gelu, torch.exp, torch.cos, Tensor.tanh])
def test_functions_of_single_numbers_do_not_depend_on_where_a_number_stands(function):
    torch.manual_seed(0)
    x = torch.randn(PIECE + 77, requires_grad=True)
    with batch_invariant(True):
        out = function(x)
        assert all(torch.equal(function(x[i:]), out[i:]) for i in (1, 13, PIECE + 70))
        found = torch.autograd.grad(out.sum(), x)[0]
    torch.testing.assert_close(out, function(x))
    torch.testing.assert_close(found, torch.autograd.grad(function(x).sum(), x)[0])


def test_log_sum_exp_and_writing_in_place_are_the_same_functions():
    torch.manual_seed(0)
    x = torch.randn(5, 33)
    with batch_invariant(True):
        found, top = x.logsumexp(dim=-1), x.amax(dim=-1, keepdim=True)
        mass = (x - top).exp_()
        assert torch.equal(mass.sum(dim=-1).log() + top[:, 0], found)
        assert torch.equal(x[3:4].logsumexp(dim=-1), found[3:4])
    torch.testing.assert_close(found, x.double().exp().sum(-1).log().float())


def check(network):
    def hidden(tokens):
        return network.model(input_ids=tokens, use_cache=False).last_hidden_state

    check_invariant(hidden, network.config.vocab_size, torch.device("cpu"))


def test_a_model_passes_and_one_that_looks_at_the_batch_is_refused():
    check(AutoModelForCausalLM.from_pretrained("models/tiny-moe-countdown").eval())
    network = build_network(LlamaConfig, attn_implementation="sdpa")
    check(network)
    mlp: Any = network.model.layers[1].mlp
    mlp.register_forward_hook(lambda module, args, out: out * len(out))
    with pytest.raises(ConfigError, match="depend on the sequences beside it"):
        check(network)
    with pytest.raises(ConfigError, match="attn_implementation to sdpa"):
        check(build_network(LlamaConfig, attn_implementation="eager"))


def test_products_of_experts_are_those_of_their_rows_with_gradients():
    torch.manual_seed(0)
    x, weight = torch.randn(75, 8, dtype=torch.float64), torch.randn(4, 8, 5, dtype=torch.float64)
    ends = torch.tensor([3, 3, 70, 75], dtype=torch.int32)  # the second expert has no row
    inputs = [x.requires_grad_(), weight.requires_grad_()]
    upstream = torch.randn(75, 5, dtype=torch.float64)
    with batch_invariant(True):
        out = F.grouped_mm(*inputs, offs=ends)
    expert = torch.tensor([0] * 3 + [2] * 67 + [3] * 5)
    wanted = torch.einsum("ri,rio->ro", x, weight[expert])
    torch.testing.assert_close(out, wanted)
    for a, b in zip(*(torch.autograd.grad(one, inputs, upstream) for one in (out, wanted)), strict=True):
        torch.testing.assert_close(a, b)


def test_a_row_of_an_expert_is_the_same_alone_and_among_others():
    torch.manual_seed(0)
    x, weight = torch.randn(150, 96), torch.randn(4, 96, 40)
    ends = torch.tensor([20, 20, 140, 150], dtype=torch.int32)
    with batch_invariant(True):
        out = F.grouped_mm(x, weight, offs=ends)
        for row, expert in ((0, 0), (77, 2), (149, 3)):
            alone = F.grouped_mm(x[row : row + 1], weight[expert : expert + 1], offs=torch.ones(1, dtype=torch.int32))
            assert torch.equal(alone[0], out[row])
