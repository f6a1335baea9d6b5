import pytest
import torch

from lit_qrl.rollout.embedded.sampling import TokenSampler
from lit_qrl.types import SamplingParams
from tests.triton_interpreter import everywhere


@everywhere
def test_draws(device):
    from lit_qrl.rollout.embedded import sampling_triton

    torch.manual_seed(0)
    words, rows = 3 * sampling_triton.PART + 77, 24
    logits = (6 * torch.randn(rows, words)).bfloat16()
    logits[0, :-1] = -torch.inf  # the last word is all that there is
    logits[1, sampling_triton.PART : 2 * sampling_triton.PART] = -torch.inf  # a part without mass
    logits[2] = torch.where(torch.arange(words) % 500 == 3, logits[2], -torch.inf)
    logits[3] = 0.0
    logits = logits.to(device)
    for temperature in (1.0, 0.7):
        plain = TokenSampler(SamplingParams(max_tokens=1, temperature=temperature))
        scores = plain.processed(logits)
        cumulative = scores.double().softmax(dim=-1).cumsum(dim=-1)
        every = [torch.rand(rows), torch.zeros(rows), torch.full((rows,), 1 - 2**-24)]
        for uniform in (one.to(device) for one in every):
            tokens, logprobs = sampling_triton.draw(logits, uniform, temperature)
            expected = scores.log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0]
            torch.testing.assert_close(logprobs, expected, atol=3e-6, rtol=1e-6)
            assert torch.isfinite(logprobs).all()
            # the word is the one that u lies in, but for rounding
            high = cumulative.gather(1, tokens[:, None])[:, 0]
            low = high - expected.double().exp()
            assert (low - 2e-6 <= uniform).all()
            assert (uniform <= high + 2e-6).all()
    assert tokens[0] == words - 1


@pytest.mark.gpu
def test_a_gpus_sampler_takes_the_kernel_for_whole_distributions_alone(monkeypatch):
    from lit_qrl.rollout.embedded import sampling_triton

    asked = []
    monkeypatch.setattr(sampling_triton, "draw", lambda *given: asked.append(given) or (None, None))
    logits, uniform = torch.randn(3, 40, device="cuda"), torch.rand(3, device="cuda")
    TokenSampler(SamplingParams(max_tokens=1)).drawn(logits, uniform)
    assert len(asked) == 1
    for sampling in (SamplingParams(max_tokens=1, top_k=3), SamplingParams(max_tokens=1, top_p=0.9)):
        TokenSampler(sampling).drawn(logits, uniform)
    TokenSampler(SamplingParams(max_tokens=1, temperature=0.0)).drawn(logits, None)
    assert len(asked) == 1
