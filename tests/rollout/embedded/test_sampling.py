import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_qrl.errors import ConfigError
from lit_qrl.rollout.embedded.sampling import TokenSampler, check_sampling, truncate, uniforms
from lit_qrl.types import SamplingParams
from tests.default_dtype import bf16_default


def draw(logits, uniform, **sampling):
    sampler = TokenSampler(SamplingParams(**sampling))
    return sampler.draw(sampler.processed(logits), uniform)


def kept_set(scores, top_k, top_p):
    """The kept words of one row, by the definition, in Python floats."""
    order = sorted(range(len(scores)), key=lambda word: -scores[word])
    if top_k:
        order = order[:top_k]
    total = math.fsum(math.exp(scores[word]) for word in order)
    kept, mass = [], 0.0
    for word in order:
        kept.append(word)
        mass += math.exp(scores[word]) / total
        if mass >= top_p - 1e-9:
            break
    return set(kept)


@settings(max_examples=60, deadline=None)
@given(
    scores=st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=12, unique=True),
    top_k=st.integers(0, 13),
    top_p=st.sampled_from([0.05, 0.31, 0.7, 0.95, 1.0]),
)
def test_truncation_keeps_the_defined_set(scores, top_k, top_p):
    got = truncate(torch.tensor([scores], dtype=torch.float64), top_k, top_p)[0]
    kept = {word for word, score in enumerate(got.tolist()) if score > -math.inf}
    assert kept == kept_set(scores, top_k, top_p)
    assert all(got[word] == scores[word] for word in kept)


def test_tokens_follow_the_distribution():
    logits = torch.tensor([[2.0, 0.0, -1.0, -math.inf, 1.0]])
    n = 200_000
    uniform = (torch.arange(n) + 0.5) / n
    tokens, logprobs = draw(logits.expand(n, -1), uniform, temperature=0.7)
    expected = (logits[0] / 0.7).softmax(-1)
    shares = torch.bincount(tokens, minlength=5) / n
    torch.testing.assert_close(shares, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(logprobs, expected.log()[tokens], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24])
def test_extreme_uniforms_never_draw_an_impossible_word(uniform):
    logits = torch.tensor([[-math.inf, 3.0, 2.0, -math.inf]])
    token, logprob = draw(logits, torch.tensor([uniform]))
    assert token.item() in (1, 2)
    assert math.isfinite(logprob.item())


def test_log_probs_are_renormalised_within_the_kept_set():
    logits = torch.tensor([[math.log(0.5), math.log(0.3), math.log(0.2)]]).expand(2, -1)
    tokens, logprobs = draw(logits, torch.tensor([0.1, 0.99]), top_p=0.6)
    assert tokens.tolist() == [0, 1]
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.5 / 0.8, 0.3 / 0.8]))


def test_uniforms_depend_on_seed_and_prompt_alone():
    base = uniforms(1, 2, n=3, steps=5)
    assert torch.equal(base, uniforms(1, 2, n=3, steps=9)[:, :5])
    assert not torch.equal(base, uniforms(1, 3, n=3, steps=5))
    assert not torch.equal(base, uniforms(2, 2, n=3, steps=5))
    state = torch.get_rng_state()
    uniforms(1, 2, n=3, steps=5)
    assert torch.equal(state, torch.get_rng_state())


def test_uniforms_do_not_depend_on_the_default_dtype():
    expected = uniforms(0, 1, 3, 5)
    with bf16_default():
        found = uniforms(0, 1, 3, 5)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "bad", [{"max_tokens": 0}, {"temperature": -0.1}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1}]
)
def test_parameters_out_of_range(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        check_sampling(SamplingParams(**bad))
