import pytest
import torch
from torch.nn import functional as F

from lit_qrl.network.invariant import batch_invariant
from lit_qrl.network.short_attention import QUERIES, attend_short, is_short


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("case", ["one query of a cache", "causal", "everything", "a scale"])
def test_outputs_and_gradients_are_those_of_torch(heads, case):
    torch.manual_seed(0)
    n, m = (1, 9) if case == "one query of a cache" else (7, 7)
    q = torch.randn(3, n, heads[0], 8).transpose(1, 2).requires_grad_()
    k, v = (torch.randn(3, heads[1], m + 2, 8)[:, :, :m].requires_grad_() for _ in range(2))
    seen = torch.ones(1, 1, n, m, dtype=torch.bool).tril() if case == "causal" else None
    if n == 1:
        seen = (torch.arange(m) >= torch.tensor([0, 3, 8])[:, None])[:, None, None]
    scale = 0.3 if case == "a scale" else None
    got = attend_short(q, k, v, seen, scale)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
    torch.testing.assert_close(got, expected)
    grad = torch.randn_like(got)
    torch.testing.assert_close(
        torch.autograd.grad(got, (q, k, v), grad), torch.autograd.grad(expected, (q, k, v), grad)
    )


def test_16_bits_long_sequences_and_invariant_bits_are_torch_s():
    query = torch.zeros(1, 2, QUERIES, 4)
    assert is_short(query)
    assert not is_short(query.bfloat16())
    assert not is_short(torch.zeros(1, 2, QUERIES + 1, 4))
    with batch_invariant(True):
        assert not is_short(query)
