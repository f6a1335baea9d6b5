import sys
from types import SimpleNamespace

import pytest
import torch

from lit_qrl.functional import logprobs
from lit_qrl.functional.logprobs import token_logprobs
from tests.triton_interpreter import everywhere


def reduced(logits, tokens, factor, entropy):
    z = logits.float() * factor
    spread = torch.special.entr(z.softmax(-1)).sum(-1)
    return z.logsumexp(-1), z.gather(-1, tokens[:, None])[:, 0], spread if entropy else None


def to_gradient(logits, tokens, normalizer, upstream, factor):
    shares = (logits.float() * factor - normalizer[:, None]).exp()
    grad = -shares * upstream[:, None]
    grad[torch.arange(len(tokens)), tokens] += upstream
    logits.copy_(grad)


def problem(n, h, v, dtype, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, h, generator=generator).to(device, dtype)
    weight = torch.randn(v, h, generator=generator).to(device, dtype)
    return hidden, weight, torch.randint(v, (n,), generator=generator).to(device)


def trained(hidden, weight, tokens, **options):
    leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    values, entropies = token_logprobs(*leaves, tokens, entropy=True, **options)
    (values * torch.linspace(-1, 2, len(tokens), device=values.device)).sum().backward()
    return values.detach(), entropies, *(leaf.grad for leaf in leaves)


def played(monkeypatch, calls):
    """Let plain operations take the place of the kernels, count products with the head; return what is asked."""
    asked = []
    kernels = SimpleNamespace(
        reduced=lambda *a: asked.append("reduced") or reduced(*a),
        to_gradient=lambda *a: asked.append("gradient") or to_gradient(*a),
    )
    monkeypatch.setitem(sys.modules, "lit_qrl.functional._logprobs_triton", kernels)
    monkeypatch.setattr("lit_qrl.functional._logprobs_triton", kernels, raising=False)
    monkeypatch.setattr(logprobs, "_kernel_takes", lambda hidden: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=2**37))
    product = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *a: calls.append(len(a[0])) or product(*a))
    return asked


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"temperature": 1.3, "scale": 0.25}])
@pytest.mark.parametrize("chunk_elements", [1, 40, None])
def test_what_they_are_asked_for_are_the_plain_numbers(options, chunk_elements, monkeypatch):
    inputs = problem(7, 5, 11, torch.bfloat16)
    expected = trained(*inputs, **options)
    asked = played(monkeypatch, [])
    got = trained(*inputs, chunk_elements=chunk_elements, **options)
    chunks = {1: 7, 40: 3, None: 1}[chunk_elements]  # of 1, 40 // 11 = 3 and all 7 rows
    assert asked == ["reduced"] * chunks + ["gradient"] * chunks
    for one, other, tolerance in zip(got, expected, (1e-5, 1e-5, 1e-2, 1e-2), strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("held", "products"), [(0, 6), (131, 6), (132, 5), (197, 5), (198, 3)])
def test_logits_that_may_stay_are_not_made_again(held, products, monkeypatch):
    inputs = problem(9, 5, 11, torch.bfloat16)  # three chunks of three rows, 66 bytes each
    calls = []
    played(monkeypatch, calls)
    plain = trained(*inputs, chunk_elements=33)
    assert calls == [3] * 6
    calls.clear()
    got = trained(*inputs, chunk_elements=33, held=held)
    assert len(calls) == products
    assert all(torch.equal(one, other) for one, other in zip(got, plain, strict=True))


def test_a_batch_without_a_scored_token_has_no_gradient(monkeypatch):
    hidden, weight, tokens = problem(0, 5, 11, torch.bfloat16)
    calls = []
    played(monkeypatch, calls)
    values, entropies, of_hidden, of_weight = trained(hidden, weight, tokens, held=2**30)
    assert values.shape == entropies.shape == (0,)
    assert calls == []
    assert of_hidden.shape == hidden.shape
    assert not of_weight.any()


def test_a_second_backward_pass_makes_them_again_and_none_stay_without_one(monkeypatch):
    hidden, weight, tokens = problem(6, 5, 11, torch.bfloat16)
    calls = []
    played(monkeypatch, calls)
    leaf = hidden.clone().requires_grad_()
    values = token_logprobs(leaf, weight, tokens, held=2**30)[0].sum()
    values.backward(retain_graph=True)
    once = leaf.grad.clone()
    assert calls == [6]
    values.backward()
    assert calls == [6, 6]
    assert torch.equal(leaf.grad, 2 * once)
    stayed = []
    monkeypatch.setattr(logprobs, "held_chunks", lambda *a: stayed.append(a) or 0)
    with torch.no_grad():
        token_logprobs(leaf, weight, tokens, held=2**30)
    assert stayed == []


def test_what_they_cannot_do_takes_the_plain_operations(monkeypatch):
    monkeypatch.setattr(logprobs, "_kernel_takes", lambda hidden: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=2**37))
    monkeypatch.setitem(sys.modules, "lit_qrl.functional._logprobs_triton", None)  # its import fails
    hidden, weight, tokens = problem(4, 5, 11, torch.bfloat16)
    bias = torch.zeros(11, dtype=torch.bfloat16)
    for options in ({"bias": bias}, {"softcap": 3.0}, {"head_dtype": torch.float32}):
        assert token_logprobs(hidden, weight, tokens, **options)[0].isfinite().all()
    leaf = hidden.clone().requires_grad_()
    token_logprobs(leaf, weight, tokens, entropy=True, entropy_gradient=True)[1].sum().backward()
    assert leaf.grad.isfinite().all()


@everywhere
def test_kernels(device):
    """Both kernels against plain operations in fp64."""
    from lit_qrl.functional import _logprobs_triton

    small = device.type == "cpu"
    for dtype in (torch.bfloat16, torch.float16):
        for n, h, v in ((5, 64, 999), (1, 8, 4096), (3, 8, 5000) if small else (33, 128, 151_936)):
            hidden, weight, tokens = problem(n, h, v, dtype, device)
            tokens[0] = 7
            for factor in (1.0, 1 / 0.7):
                logits = torch.nn.functional.linear(hidden, weight)
                logits[0, :3] = -torch.inf
                logits[-1] = 200 + logits[-1] / 64  # a shift must not be felt in the entropy
                wide = logits.double() * factor
                normalizer, chosen, spread = _logprobs_triton.reduced(logits, tokens, factor, True)
                torch.testing.assert_close(normalizer.double(), wide.logsumexp(-1), atol=1e-5, rtol=1e-6)
                torch.testing.assert_close(
                    chosen.double(), wide.gather(-1, tokens[:, None])[:, 0], atol=1e-5, rtol=1e-6
                )
                entropies = torch.special.entr(wide.softmax(-1)).sum(-1)
                torch.testing.assert_close(spread.double(), entropies, atol=1e-6, rtol=1e-6)
                upstream = torch.linspace(-1, 2, n, device=device)
                expected = logits.clone()
                to_gradient(expected, tokens, normalizer, upstream, factor)
                _logprobs_triton.to_gradient(logits, tokens, normalizer, upstream, factor)
                torch.testing.assert_close(logits, expected, atol=1e-6, rtol=2**-7)


@pytest.mark.gpu
@pytest.mark.parametrize("held", [0, 2**30])
@pytest.mark.parametrize("chunk_elements", [256 * 512, None])
def test_gradients_are_added_to_those_there_on_the_device(chunk_elements, held):
    hidden, weight, tokens = problem(1000, 64, 512, torch.bfloat16, "cuda")
    exact = [one.double().requires_grad_() for one in (hidden, weight)]
    leaf, head = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    upstream = torch.linspace(-1, 2, len(tokens), device="cuda")
    for _ in range(2):
        values, _ = token_logprobs(leaf, head, tokens, chunk_elements=chunk_elements, held=held)
        (values * upstream).sum().backward()
    (exact[0] @ exact[1].t()).log_softmax(-1).gather(1, tokens[:, None])[:, 0].mul(2 * upstream).sum().backward()
    for found, one in zip((leaf, head), exact, strict=True):
        assert (found.grad.double() - one.grad).norm() <= 0.02 * one.grad.norm()
