import pytest
import torch

from lit_qrl.rollout.vllm.patches import request_noise


def test_other_devices_and_requests_without_seeds_are_left_to_vllm():
    seen = []
    sample = request_noise._at_once(lambda *given, **named: seen.append((given, named)) or torch.zeros(2))
    probs = torch.full((2, 4), 0.25)
    sample(probs, {0: torch.Generator()}, False)
    sample(probs, {}, use_fp64_gumbel=True)
    assert [(len(given), named) for given, named in seen] == [(3, {}), (2, {"use_fp64_gumbel": True})]


def generators(seeds):
    return {row: torch.Generator("cuda").manual_seed(seed) for row, seed in seeds.items()}


@pytest.mark.gpu
def test_what_a_request_draws_follows_from_its_seed_and_what_it_drew_before():
    sample = request_noise._at_once(lambda *given: pytest.fail("vLLM's own loop"))
    probs = torch.rand(6, 5000, device="cuda").softmax(-1)
    row = probs[2:3]
    many = generators(dict.fromkeys(range(6), 0) | {2: 41})
    first = [sample(probs.clone(), many)[2].item() for _ in range(8)]
    alone = generators({0: 41})
    assert [sample(row.clone(), alone)[0].item() for _ in range(8)] == first
    assert len(set(first)) > 4
    assert many[2].get_offset() == alone[0].get_offset() == 8 * request_noise.STEP
    mixed = {1: generators({0: 41})[0]}  # the other row has no seed
    assert sample(torch.cat([row, row]), mixed)[1].item() == first[0]


@pytest.mark.gpu
def test_words_are_as_frequent_as_they_are_likely():
    sample = request_noise._at_once(lambda *given: pytest.fail("vLLM's own loop"))
    likely = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625, 0.0], device="cuda")
    count = 20_000
    drawn = sample(likely.repeat(count, 1), generators({row: row + 1 for row in range(count)}))
    seen = torch.bincount(drawn, minlength=6).cpu().double()
    expected = count * likely.cpu().double()[:5]
    assert seen[5] == 0
    assert ((seen[:5] - expected).square() / expected).sum() < 18.5  # χ² with four degrees of freedom at 0.001
