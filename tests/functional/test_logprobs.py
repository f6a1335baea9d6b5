import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lit_qrl.functional.logprobs import even_rows, held_chunks, kernel_elements, softmax_logprobs, token_logprobs


def reference(hidden, weight, tokens, temperature=1.0, bias=None, softcap=None, scale=1.0):
    """One position at a time, in Python floats."""
    logprobs, entropies = [], []
    for row, token in zip(hidden.tolist(), tokens.tolist(), strict=True):
        scores = []
        for word, embedding in enumerate(weight.tolist()):
            score = sum(x * w for x, w in zip(row, embedding, strict=True)) + (0 if bias is None else bias[word].item())
            score *= scale
            if softcap is not None:
                score = softcap * math.tanh(score / softcap)
            scores.append(score / temperature)
        top = max(scores)
        normalizer = top + math.log(math.fsum(math.exp(score - top) for score in scores))
        logprobs.append(scores[token] - normalizer)
        entropies.append(-math.fsum(math.exp(score - normalizer) * (score - normalizer) for score in scores))
    return torch.tensor(logprobs, dtype=torch.float64), torch.tensor(entropies, dtype=torch.float64)


def problem(n=7, h=5, v=11, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, h, generator=generator, dtype=torch.float64)
    weight = torch.randn(v, h, generator=generator, dtype=torch.float64) * 2
    bias = torch.randn(v, generator=generator, dtype=torch.float64)
    tokens = torch.randint(v, (n,), generator=generator)
    return hidden.to(dtype), weight.to(dtype), bias.to(dtype), tokens


CASES = [{}, {"temperature": 0.7}, {"temperature": 1.3, "softcap": 3.0}, {"scale": 0.25, "softcap": 2.0}]


@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk_elements", [1, 25, None])
def test_values_match_a_loop(options, with_bias, chunk_elements):
    hidden, weight, bias, tokens = problem()
    bias = bias if with_bias else None
    expected, expected_entropy = reference(hidden, weight, tokens, bias=bias, **options)
    got, entropy = token_logprobs(
        hidden, weight, tokens, bias=bias, entropy=True, chunk_elements=chunk_elements, **options
    )
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-10, atol=1e-10)


KEPT = [[3, 0, 7], [10, -1, -1], [], [5, 2, -1], [1, 4, 9], [0, -1, -1], [6, 8, -1]]


def among(tokens):
    """Return ids "n k" that hold each row's token, −1 behind them; all −1 where anything goes."""
    rows = [
        [token, *[one for one in ids if one != token]] if ids else [] for token, ids in zip(tokens, KEPT, strict=True)
    ]
    return torch.tensor([[*row, *[-1] * (4 - len(row))] for row in rows], dtype=torch.int32)


@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize("chunk_elements", [1, 25, None])
def test_a_distribution_over_kept_words_is_that_of_a_head_of_those_words(options, chunk_elements):
    hidden, weight, bias, tokens = problem()
    kept = among(tokens.tolist())
    got, entropy = token_logprobs(
        hidden, weight, tokens, bias=bias, entropy=True, kept=kept, chunk_elements=chunk_elements, **options
    )
    for i, ids in enumerate(kept):
        words = ids[ids >= 0].long() if (ids >= 0).any() else torch.arange(len(weight))
        place = (words == tokens[i]).nonzero()[0]
        expected = reference(hidden[i : i + 1], weight[words], place, bias=bias[words], **options)
        torch.testing.assert_close((got[i : i + 1], entropy[i : i + 1]), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("options", "chunk_elements"), zip(CASES, (25, 1, None, 25), strict=True))
@pytest.mark.parametrize(
    ("entropy", "of"),
    [(False, "all words"), (True, "all words"), (True, "no bias"), (False, "kept words"), (True, "kept words")],
)
def test_gradients_match_finite_differences(options, chunk_elements, entropy, of):
    hidden, weight, bias, tokens = problem()
    given = {"kept": among(tokens.tolist()) if of == "kept words" else None, "chunk_elements": chunk_elements}
    given |= {"entropy": entropy, "entropy_gradient": entropy, **options}
    inputs = [one.requires_grad_() for one in (hidden, weight, bias)[: 2 if of == "no bias" else 3]]

    def run(h, w, b=None):
        logprobs, entropies = token_logprobs(h, w, tokens, bias=b, **given)
        return (logprobs, entropies) if entropy else logprobs

    assert torch.autograd.gradcheck(run, inputs)


def test_several_leading_dimensions():
    hidden, weight, _, tokens = problem(n=12)
    flat, _ = token_logprobs(hidden, weight, tokens)
    folded, entropy = token_logprobs(hidden.view(3, 4, -1), weight, tokens.view(3, 4), entropy=True)
    assert torch.equal(folded.flatten(), flat)
    assert entropy.shape == (3, 4)


def test_entropy_is_detached_and_leaves_the_gradient_alone():
    hidden, weight, _, tokens = problem()
    grads = []
    for entropy in (False, True):
        leaf = hidden.clone().requires_grad_()
        logprobs, entropies = token_logprobs(leaf, weight, tokens, entropy=entropy)
        logprobs.sum().backward()
        grads.append(leaf.grad)
    assert not entropies.requires_grad
    assert torch.equal(*grads)


def test_entropy_gradient_of_words_without_probability_is_zero():
    weight = torch.tensor([[1.0], [1.0], [-1e4]], requires_grad=True)
    _, entropies = token_logprobs(torch.ones(1, 1), weight, torch.tensor([0]), entropy=True, entropy_gradient=True)
    entropies.sum().backward()
    assert entropies.item() == pytest.approx(math.log(2))
    torch.testing.assert_close(weight.grad, torch.zeros(3, 1), rtol=0, atol=1e-7)


def test_half_precision_logits_are_reduced_in_fp32():
    hidden, weight, _, tokens = problem(n=64, h=32, v=500, dtype=torch.bfloat16)
    got, entropy = token_logprobs(hidden, weight, tokens, entropy=True)
    assert got.dtype == entropy.dtype == torch.float32
    logits = torch.nn.functional.linear(hidden, weight).double()
    torch.testing.assert_close(
        got.double(), logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0], atol=1e-5, rtol=0
    )


def test_bf16_weight_gradient_over_many_chunks_stays_accurate():
    hidden, weight, _, tokens = problem(n=512, h=8, v=16)
    exact = weight.clone().requires_grad_()
    token_logprobs(hidden, exact, tokens)[0].sum().backward()
    half = weight.bfloat16().requires_grad_()
    token_logprobs(hidden.bfloat16(), half, tokens, chunk_elements=16)[0].sum().backward()
    error = (half.grad.double() - exact.grad).norm() / exact.grad.norm()
    assert half.grad.dtype == torch.bfloat16
    assert error < 0.01


class LargestTensor(TorchDispatchMode):
    """Records the element count of the largest tensor of these dtypes that any operation returned."""

    def __init__(self, *dtypes):
        super().__init__()
        self.dtypes, self.largest = dtypes, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.dtype in self.dtypes:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes() // tensor.itemsize)
        return out


def test_no_tensor_of_all_logits_in_either_pass():
    n, h, v, chunk = 128, 4, 1000, 8000
    hidden, weight, _, tokens = problem(n, h, v, torch.float32)
    hidden.requires_grad_()
    weight.requires_grad_()
    with LargestTensor(torch.float32) as watch:
        logprobs, _ = token_logprobs(hidden, weight, tokens, entropy=True, chunk_elements=chunk)
        logprobs.sum().backward()
    assert watch.largest <= chunk
    with LargestTensor(torch.float32) as control:
        softmax_logprobs(hidden @ weight.T, tokens)
    assert control.largest == n * v


def test_autocast_computes_logits_in_the_autocast_dtype():
    hidden, weight, bias, tokens = problem(n=16, dtype=torch.float32)
    weight.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, _ = token_logprobs(hidden, weight, tokens, bias=bias)
        logits = torch.nn.functional.linear(hidden, weight, bias)
    assert logits.dtype == torch.bfloat16
    expected = logits.detach().float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(got.detach(), expected, atol=1e-6, rtol=0)
    got.sum().backward()
    assert weight.grad.dtype == torch.float32


def test_from_logits_matches_the_loop_and_its_gradient():
    hidden, weight, _, tokens = problem()
    expected, _ = reference(hidden, weight, tokens, temperature=0.8)
    logits = (hidden @ weight.T).requires_grad_()
    torch.testing.assert_close(softmax_logprobs(logits, tokens, 0.8).detach(), expected)
    assert torch.autograd.gradcheck(lambda x: softmax_logprobs(x, tokens, 0.8), [logits])


@pytest.mark.parametrize("shift", [0.0, 30.0, 200.0])
def test_entropy_loses_nothing_to_a_shift_and_is_never_below_zero(shift):
    logits = torch.randn(50, 3000, generator=torch.Generator().manual_seed(0)) * 3 + shift
    logits[0, 0] += 300  # a word that is certain
    tokens = torch.zeros(50, dtype=torch.long)
    expected = torch.special.entr(logits.double().softmax(-1)).sum(-1)
    columns = torch.eye(50)
    _, got = token_logprobs(columns, logits.T.contiguous(), tokens, entropy=True)
    assert got.min() >= 0
    torch.testing.assert_close(got.double(), expected, atol=1e-6, rtol=0)


def test_masked_words_have_no_entropy():
    weight = torch.tensor([[0.0], [-math.inf], [0.0]])
    logprobs, entropy = token_logprobs(torch.ones(1, 1), weight, torch.tensor([2]), entropy=True)
    assert logprobs.item() == pytest.approx(-math.log(2))
    assert entropy.item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_temperature_must_be_positive(temperature):
    hidden, weight, _, tokens = problem()
    with pytest.raises(ValueError, match="positive temperature"):
        token_logprobs(hidden, weight, tokens, temperature)


# ---------------------------------------------------------------------------------------------------- the head in fp32


def head_in_bf16(std, n=64, v=3000, h=64):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(v, h, generator=generator).bfloat16()
    hidden = (torch.randn(n, h, generator=generator) * std / math.sqrt(h)).bfloat16()
    scores = hidden.double() @ weight.double().T
    assert float(scores.std()) == pytest.approx(std, rel=0.1)
    tokens = torch.multinomial(scores.softmax(-1), 1, generator=generator)[:, 0]  # as a sampler draws them
    return hidden, weight, tokens


@pytest.mark.parametrize("std", [4, 8])
def test_a_head_in_bf16_is_off_by_its_logits_rounding_and_one_in_fp32_is_not(std):
    hidden, weight, tokens = head_in_bf16(std)
    expected, entropy = token_logprobs(hidden.double(), weight.double(), tokens, entropy=True)
    rounded, _ = token_logprobs(hidden, weight, tokens)
    raised, raised_entropy = token_logprobs(
        hidden, weight, tokens, head_dtype=torch.float32, entropy=True, chunk_elements=20_000
    )
    assert float((rounded - expected).abs().mean()) > 5e-3
    # relative to the logits, of which log-probs are differences
    size = float((hidden.double() @ weight.double().T).abs().max())
    assert float((raised - expected).abs().max()) < 1e-5 * size
    torch.testing.assert_close(raised.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(raised_entropy.double(), entropy, rtol=0, atol=1e-5 * size)


@pytest.mark.parametrize(("hidden_dtype", "weight_dtype"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_gradients_of_a_head_in_fp32_are_those_of_fp64(hidden_dtype, weight_dtype):
    hidden, weight, tokens = head_in_bf16(4)
    hidden = hidden.to(getattr(torch, hidden_dtype)).requires_grad_()
    weight = weight.to(getattr(torch, weight_dtype)).requires_grad_()
    bias = torch.randn(len(weight), generator=torch.Generator().manual_seed(1)).requires_grad_()
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    options = {"temperature": 0.9, "softcap": 30.0, "entropy": True, "entropy_gradient": True}
    for leaves, chunk, dtype in (((hidden, weight, bias), 20_000, torch.float32), (exact, None, None)):
        logprobs, entropy = token_logprobs(
            leaves[0], leaves[1], tokens, bias=leaves[2], chunk_elements=chunk, head_dtype=dtype, **options
        )
        (logprobs.sum() + 0.1 * entropy.sum()).backward()
    for leaf, wanted in zip((hidden, weight, bias), exact, strict=True):
        rounding = 2**-8 if leaf.dtype == torch.bfloat16 else 1e-5  # a gradient has its tensor's dtype
        assert float((leaf.grad.double() - wanted.grad).norm() / wanted.grad.norm()) < rounding


def test_autocast_leaves_a_head_in_fp32_alone():
    hidden, weight, tokens = head_in_bf16(4)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = token_logprobs(hidden.float(), weight.float(), tokens, head_dtype=torch.float32)
    assert torch.equal(found, token_logprobs(hidden.float(), weight.float(), tokens)[0])


def test_no_copy_of_the_whole_head_is_made_in_fp32():
    hidden, weight, tokens = head_in_bf16(4)
    hidden.requires_grad_()
    with LargestTensor(torch.float32) as watch:  # a frozen head, as under an adapter
        token_logprobs(hidden, weight, tokens, head_dtype=torch.float32, chunk_elements=20_000)[0].sum().backward()
    assert watch.largest <= 20_000
    assert weight.numel() > 9 * 20_000


def test_chunks_are_even_and_no_larger_than_asked():
    for count in (1, 127, 128, 5000, 8192, 65_536):
        for most in (128, 1000, 7067):
            rows = even_rows(count, most)
            chunks = -(-count // rows)
            assert rows <= most
            assert chunks == -(-count // most) or rows % 128 == 0
            assert (chunks - 1) * rows < count <= chunks * rows


def test_chunks_that_stay_leave_room_for_the_one_at_work():
    for count in range(1, 6):
        for room in range(60):
            stay = held_chunks(count, 10, room)
            assert 0 <= stay <= count
            assert stay == 0 or 10 * min(stay + 1, count) <= room
            assert stay == count or 10 * min(stay + 2, count) > room


def test_a_larger_gpu_holds_more_logits():
    held = [kernel_elements(gib << 30) for gib in (8, 24, 80, 141, 288)]
    assert held == sorted(held)
    assert all(
        2 * count <= (gib << 30) / 64 or count == 2**26 for count, gib in zip(held, (8, 24, 80, 141, 288), strict=True)
    )
