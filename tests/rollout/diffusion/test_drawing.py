import torch

from lit_qrl.functional.diffusion import confidence, gumbel_argmax
from lit_qrl.rollout.diffusion.decode import Denoiser
from lit_qrl.types import SamplingParams
from tests.networks import MASK, build_denoiser


def drawn_by(network, share=None, **sampling):
    denoiser = Denoiser(network, SamplingParams(**sampling), block=4, steps=4)
    denoiser.share = share or denoiser.share
    states = torch.randn(3, 4, network.config.hidden_size, generator=torch.Generator().manual_seed(0))
    noise = [torch.Generator().manual_seed(row) for row in range(3)]
    with torch.no_grad():
        return denoiser, states, denoiser.draw(states, None, noise)


def test_tokens_and_confidences_are_of_the_heads_logits_without_the_mask_token():
    network = build_denoiser()
    denoiser, states, (tokens, sure) = drawn_by(network, temperature=0.7)
    logits = network.lm_head(states).detach()
    logits[..., MASK] = float("-inf")
    rows = [torch.Generator().manual_seed(row) for row in range(3)]
    uniform = torch.stack([torch.rand(logits.shape[1:], generator=row, dtype=torch.float64) for row in rows])
    expected = gumbel_argmax(logits, uniform, 0.7)
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(sure, confidence(logits, expected))
    assert denoiser.memory(3).shape == logits.shape


def test_noise_is_the_same_however_the_rows_are_cut():
    network = build_denoiser()
    *_, (whole, sure) = drawn_by(network, temperature=1.0)
    denoiser, _, (parts, also) = drawn_by(network, share=2, temperature=1.0)
    assert torch.equal(whole, parts)
    assert torch.equal(sure, also)
    assert denoiser.memory(3) is None
    assert drawn_by(network, temperature=0.0)[0].memory(1) is None
