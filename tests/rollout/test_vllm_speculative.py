"""Proposed tokens change nothing of what vLLM draws: the distribution is the sampler's, and the log-probs are of it."""

import math

import pytest
import torch

from lit_qrl.rollout.embedded.sampling import truncate
from lit_qrl.types import SamplingParams
from tests.vllm_engines import build_engine, publish, reference_logprobs, tiny_network

pytestmark = pytest.mark.vllm

WORDS, DRAWS, STEPS = 64, 800, 3
COLD = 0.3


@pytest.fixture(scope="module")
def speculating():
    """(network, engine, counts) of an engine that proposes after a single known token, and how many it accepted."""
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    counts, original = [0, 0], RejectionSampler.forward

    def forward(self, metadata, *args):
        out = original(self, metadata, *args)
        counts[0] += sum(metadata.num_draft_tokens)
        counts[1] += int((out.sampled_token_ids >= 0).sum()) - len(out.sampled_token_ids)
        return out

    network = tiny_network(vocab_size=WORDS)
    options = {"method": "ngram", "num_speculative_tokens": STEPS, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    engine = build_engine(network, max_num_seqs=256, engine_args={"speculative_config": options})
    with pytest.MonkeyPatch.context() as patch:
        publish(network, engine, None, 0)
        patch.setattr(RejectionSampler, "forward", forward)
        yield network, engine, counts
    engine.close()


def permutation(seed):
    """A prompt with every word, so that something is proposed after any."""
    return torch.randperm(WORDS, generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def logits(network, prompt, token_ids):
    return network(input_ids=torch.tensor([[*prompt, *token_ids]])).logits[0, len(prompt) - 1 : -1].float()


def test_greedy_tokens_are_the_likeliest_ones(speculating):
    network, engine, counts = speculating
    counts[:] = 0, 0
    asked = [permutation(seed) for seed in range(4)]
    for prompt, one in zip(
        asked, engine.generate(asked, 1, 0, sampling=SamplingParams(max_tokens=24, temperature=0)), strict=True
    ):
        assert logits(network, prompt, one.token_ids).argmax(-1).tolist() == one.token_ids
        assert (torch.tensor(one.logprobs) - reference_logprobs(network, prompt, one.token_ids)).abs().max() < 1e-5
    assert counts[0] > 20


@pytest.mark.parametrize("truncation", [{}, {"top_k": 5}, {"top_p": 0.8}])
def test_log_probs_are_those_of_the_tokens_and_seeds_hold(speculating, truncation):
    network, engine, _ = speculating
    asked = [permutation(seed) for seed in range(3)]
    sampling = SamplingParams(max_tokens=24, temperature=COLD, ignore_stop=True, **truncation)
    drawn = engine.generate(asked, 2, 3, sampling=sampling)
    assert [one.token_ids for one in engine.generate(asked, 2, 3, sampling=sampling)] == [o.token_ids for o in drawn]
    for i, one in enumerate(drawn):
        scores = logits(network, asked[i // 2], one.token_ids) / COLD
        if "top_k" in truncation:
            scores = scores.masked_fill(scores < scores.topk(truncation["top_k"]).values[:, -1:], -math.inf)
        if "top_p" in truncation:
            scores = truncate(scores, 0, truncation["top_p"])
        expected = scores.log_softmax(-1).gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(one.logprobs), expected, atol=2e-5, rtol=0)


@torch.no_grad()
def test_tokens_are_as_frequent_as_the_policy_says(speculating, margin):
    """χ² of the second and third token, which are proposed, against the exact probabilities over all beginnings."""
    network, engine, counts = speculating
    beginning = permutation(5)
    greedy = SamplingParams(max_tokens=90, temperature=0, ignore_stop=True)
    # Greedy words repeat themselves, so what is looked up is often likely.
    prompt = beginning + engine.generate([beginning], 1, 0, sampling=greedy)[0].token_ids
    last = network(input_ids=torch.tensor([prompt])).logits[0, -1]
    cold = next(t for t in (0.4, 0.3, 0.2, 0.15, 0.1, 0.07, 0.05) if (last / t).softmax(-1).max() > 0.4)
    counts[:] = 0, 0
    sampling = SamplingParams(max_tokens=STEPS, temperature=cold, ignore_stop=True)
    drawn = engine.generate([prompt], DRAWS, 11, sampling=sampling)
    assert 0.02 < counts[1] / counts[0] < 0.9  # words that are accepted, and words that replace others
    words = torch.arange(WORDS)

    def after(beginnings):
        """Probabilities "n words" of what follows the last word of the prompt and beginnings "n t"."""
        start = network(input_ids=torch.tensor([prompt[:-1]]), use_cache=True).past_key_values
        start.batch_repeat_interleave(len(beginnings))
        rows = torch.cat([torch.full((len(beginnings), 1), prompt[-1]), beginnings], dim=1)
        scores = network(input_ids=rows, past_key_values=start).logits[:, -1].float()
        return (scores / cold).softmax(-1).double()

    first = after(torch.empty(1, 0, dtype=torch.long))[0]
    second = after(words[:, None])
    pairs = torch.cartesian_prod(words, words)
    third = torch.cat([after(part) for part in pairs.split(1024)]).view(WORDS, WORDS, WORDS)
    shares = first, first @ second, torch.einsum("a,ab,abc->c", first, second, third)
    found = torch.tensor([one.token_ids for one in drawn])
    for step, share in enumerate(shares):
        observed = found[:, step].bincount(minlength=WORDS).double()
        expected = share * DRAWS
        common = expected >= 5  # the rest together
        seen = torch.cat([observed[common], observed[~common].sum()[None]])
        due = torch.cat([expected[common], expected[~common].sum()[None]])
        statistic, freedom = float(((seen - due) ** 2 / due).sum()), len(due) - 1
        assert statistic < freedom + 4 * math.sqrt(2 * freedom)
        margin(f"token {step}: χ² of {freedom} degrees of freedom", f"{statistic:.0f}")
