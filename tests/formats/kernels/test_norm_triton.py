import pytest
import torch

from lit_qrl.formats.kernels.activations import e4m3_codes
from tests.formats.kernels.test_tiles_triton import INTERPRETED
from tests.triton_interpreter import everywhere


def close(made, exact, digits=8):
    return torch.allclose(made.cpu().double(), exact, rtol=2.0**-digits, atol=2.0**-digits)


@everywhere
def test_norm(device):
    """Both passes in fp64, with a residual and without."""
    from lit_qrl.formats.kernels import norm_triton

    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16):
        for m, k in ((70, 384), (3, 200), (37, 16)):
            x, other, grad, beside = (torch.randn(m, k, generator=generator).to(dtype) for _ in range(4))
            weight = (torch.rand(k, generator=generator) + 0.5).to(dtype)
            for residual in (other, None):
                given = None if residual is None else residual.to(device)
                h, y, rstd, _ = norm_triton.norm(x.to(device), weight.to(device), 1e-6, given)
                expected = x if residual is None else residual + x
                assert torch.equal(h.cpu(), expected)
                inverse = torch.rsqrt(expected.double().square().mean(-1) + 1e-6)
                once = (expected.float() * inverse.float()[:, None]).to(dtype)
                assert torch.allclose(rstd.cpu().double(), inverse, rtol=1e-5)
                assert (y.cpu() != weight * once).float().mean() < 0.01  # the last bit, at times
                assert close(y, (weight * once).double(), 6)
                alone = norm_triton.norm(x.to(device), weight.to(device), 1e-6, given, scale=False)
                assert torch.equal(alone[0].cpu(), expected)
                assert torch.allclose(alone[2], rstd, rtol=1e-6)
            unit = x.double() * rstd.cpu().double()[:, None]
            scaled = grad.double() * weight.double()
            exact = (scaled - unit * (scaled * unit).mean(-1, keepdim=True)) * rstd.cpu().double()[:, None]
            for more in (None, beside):
                made, gain = norm_triton.norm_backward(
                    grad.to(device), x.to(device), rstd, weight.to(device), None if more is None else more.to(device),
                    programs=6,
                )  # fmt: skip
                assert close(made, exact if more is None else exact + more.double(), 7)
                assert torch.allclose(gain.cpu().double(), (grad.double() * unit).sum(0), rtol=1e-4, atol=1e-4)


@everywhere(script=INTERPRETED)
def test_codes_in_passing(device):
    """They are as they are made of the output by itself, and change nothing else."""
    from lit_qrl.formats.kernels import norm_triton

    for dtype in (torch.bfloat16, torch.float16):
        for m, k in ((70, 384), (3, 128), (9, 2048)):
            x, weight = torch.randn(m, k).to(dtype).to(device), (torch.rand(k) + 0.5).to(dtype).to(device)
            x[1] = 0
            _, y, rstd, none = norm_triton.norm(x, weight, 1e-6, x)
            assert none is None
            for extent, columns in ((128, 128), (-1, k)):
                _, again, alike, made = norm_triton.norm(x, weight, 1e-6, x, extent=extent)
                assert torch.allclose(alike, rstd, rtol=1e-6)  # sums may have another order
                assert (again != y).float().mean() < 0.01
                codes, scales = e4m3_codes(again.cpu(), (1, columns))
                assert torch.equal(made[0].cpu().view(torch.uint8), codes.view(torch.uint8))
                assert torch.equal(made[1].cpu(), scales)


@pytest.mark.vllm  # which brings Triton
@pytest.mark.parametrize("k", [16, 64, 128, 200, 384, 896, 1536, 2048, 3584, 5120, 8192, 12288])
def test_programs_have_a_power_of_two_of_columns_rows_and_warps(k):
    from lit_qrl.formats.kernels import norm_triton

    rows, size, warps = norm_triton._shape(k)
    assert size >= k
    assert warps in (1, 2, 4, 8, 16)
    assert all(one > 0 and one & (one - 1) == 0 for one in (rows, size))
