import pytest
import torch

from lit_qrl.functional.vocabulary_kl import vocabulary_kl


def head_of(words, width, softcap, scale, bias, seed):
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(words, width, generator=draw, dtype=torch.float64)
    offset = torch.randn(words, generator=draw, dtype=torch.float64) if bias else None
    return {"weight": weight, "bias": offset, "scale": scale, "softcap": softcap}


def log_shares(hidden, head, temperature, words):
    scores = hidden @ head["weight"][:words].T + (0 if head["bias"] is None else head["bias"][:words])
    scores = scores * head["scale"]
    if head["softcap"]:
        scores = head["softcap"] * torch.tanh(scores / head["softcap"])
    return (scores / temperature).log_softmax(-1)


@pytest.mark.parametrize(
    "softcap, scale, bias, temperature", [(None, 1.0, False, 1.0), (3.0, 0.7, True, 0.6), (None, 2.0, True, 1.3)]
)
@pytest.mark.parametrize("chunk_elements", [1, 40, 10_000])
def test_value_and_gradients_are_those_of_all_logits(softcap, scale, bias, temperature, chunk_elements):
    torch.manual_seed(0)
    own, other = head_of(13, 5, softcap, scale, bias, 1), head_of(11, 7, softcap, scale, bias, 2)
    trained = [torch.randn(9, 5, dtype=torch.float64), own["weight"], *([own["bias"]] if bias else [])]
    for one in trained:
        one.requires_grad_(True)
    reference_hidden, upstream = torch.randn(9, 7, dtype=torch.float64), torch.randn(9, dtype=torch.float64)
    kl = vocabulary_kl(trained[0], own, reference_hidden, other, temperature, chunk_elements)
    gradients = torch.autograd.grad(kl, trained, upstream)
    p = log_shares(trained[0], own, temperature, 11)
    expected = (p.exp() * (p - log_shares(reference_hidden, other, temperature, 11))).sum(-1)
    torch.testing.assert_close(kl, expected, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, trained, upstream), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_a_word_without_probability_adds_nothing():
    head = {"weight": torch.eye(2), "bias": None, "scale": 1.0, "softcap": None}
    hidden = torch.tensor([[300.0, -300.0]], requires_grad=True)
    kl = vocabulary_kl(hidden, head, torch.tensor([[0.0, 0.0]]), head)
    kl.sum().backward()
    assert kl.item() == pytest.approx(0.6931, abs=1e-4)
    assert torch.equal(hidden.grad, torch.zeros(1, 2))
