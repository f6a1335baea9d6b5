"""The kernels of a norm and of the residual sum before it against the formulas: interpreted, or compiled on a GPU."""

import pytest
import torch

from tests.triton_interpreter import run_interpreted


def close(made, exact, digits=8):
    return torch.allclose(made.cpu().double(), exact, rtol=2.0**-digits, atol=2.0**-digits)


def compare_norm(device):
    """Both passes in fp64, with a residual and without, rows that a program holds and wider ones."""
    from lit_qrl.formats.kernels import norm_triton

    generator = torch.Generator().manual_seed(0)
    widest = norm_triton.WIDEST, norm_triton.PART
    try:
        for dtype in (torch.bfloat16, torch.float16):
            for m, k in ((70, 384), (3, 200), (37, 16)):
                x, other, grad, beside = (torch.randn(m, k, generator=generator).to(dtype) for _ in range(4))
                weight = (torch.rand(k, generator=generator) + 0.5).to(dtype)
                for norm_triton.WIDEST, norm_triton.PART in (widest, (128, 128)):
                    for residual in (None, other):
                        given = None if residual is None else residual.to(device)
                        h, y, rstd = norm_triton.norm(x.to(device), weight.to(device), 1e-6, given)
                        expected = x if residual is None else residual + x
                        assert torch.equal(h.cpu(), expected)
                        unit = expected.double()
                        inverse = torch.rsqrt(unit.square().mean(-1) + 1e-6)
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
                            grad.to(device), x.to(device), rstd, weight.to(device),
                            None if more is None else more.to(device), programs=6,
                        )  # fmt: skip
                        assert close(made, exact if more is None else exact + more.double(), 7)
                        assert torch.allclose(gain.cpu().double(), (grad.double() * unit).sum(0), rtol=1e-4, atol=1e-4)
    finally:
        norm_triton.WIDEST, norm_triton.PART = widest


@pytest.mark.vllm  # which brings Triton
def test_kernels_in_the_interpreter():
    run_interpreted(compare_norm)


@pytest.mark.gpu
def test_kernels_on_the_device():
    compare_norm(torch.device("cuda"))
