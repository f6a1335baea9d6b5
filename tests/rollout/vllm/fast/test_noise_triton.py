import math

import torch

from tests.triton_interpreter import everywhere


def made(device, seeds, draws, words=3000):
    from lit_qrl_vllm_fast import noise_triton

    noise = torch.full((len(seeds), words), float("nan"), device=device)
    numbers = [*range(len(seeds)), *seeds, *draws]
    rows, keys, counts = noise_triton.on_device(numbers, torch.device(device)).view(3, -1)
    noise_triton.exponential_rows(noise, rows, keys, counts)
    return noise.cpu()


@everywhere
def test_noise(device):
    large = 2**53 + 12345
    noise = made(device, [7, 8, 7, large, large + 2**32], [0, 0, 1, 0, 0], 6001)
    assert (noise > 0).all()
    assert noise.isfinite().all()
    for row in noise.double():
        ordered, n = row.sort().values, row.numel()
        cdf, rank = 1 - (-ordered).exp(), torch.arange(1, n + 1) / n
        distance = max((rank - cdf).max(), (cdf - rank + 1 / n).max())
        assert distance < 1.95 / math.sqrt(n)  # Kolmogorov and Smirnov's bound at 0.001
    normal = (noise - 1).double()
    together = (normal @ normal.t() / normal.shape[1]).fill_diagonal_(0)
    assert together.abs().max() < 5 / math.sqrt(normal.shape[1])  # seeds and draws make numbers of their own
    quarters = normal[:, :6000].unflatten(1, (4, 1500))
    across = torch.einsum("rqn,rpn->qp", quarters, quarters).fill_diagonal_(0) / 7500
    assert across.abs().max() < 5 / math.sqrt(7500)
    # A row follows from its seed and draw alone, wherever it stands and however many stand beside it.
    assert torch.equal(made(device, [large, 8], [0, 0], 6001), noise[[3, 1]])
    assert torch.equal(made(device, [7], [1], 6001), noise[2:3])


@everywhere
def test_smallest(device):
    """Numbers near zero decide between words; they must be as frequent as they should be."""
    noise = made(device, [1], [0], 400_000).double()[0]
    for bound in (1e-5, 1e-4, 1e-3):
        expected = 400_000 * (1 - math.exp(-bound))
        assert abs((noise < bound).sum() - expected) < 4 * math.sqrt(expected) + 1
