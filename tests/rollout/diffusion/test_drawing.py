import torch

from lit_qrl.rollout.diffusion.decode import Denoiser
from lit_qrl.types import SamplingParams
from tests.networks import build_denoiser


def drawn_by(network, share=None, **sampling):
    denoiser = Denoiser(network, SamplingParams(**sampling), block=4, steps=4)
    denoiser.share = share or denoiser.share
    states = torch.randn(3, 4, network.config.hidden_size, generator=torch.Generator().manual_seed(0))
    noise = [torch.Generator().manual_seed(row) for row in range(3)]
    with torch.no_grad():
        return denoiser, *denoiser.draw(states, None, noise)


def test_noise_is_the_same_however_the_rows_are_cut():
    network = build_denoiser()
    _, whole, sure = drawn_by(network, temperature=1.0)
    denoiser, parts, also = drawn_by(network, share=2, temperature=1.0)
    assert torch.equal(whole, parts)
    assert torch.equal(sure, also)
    assert denoiser.memory(3) is None
    assert drawn_by(network, temperature=0.0)[0].memory(1) is None
