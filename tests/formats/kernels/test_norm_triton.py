import pytest
import torch

from tests.triton_interpreter import EVERYWHERE


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
@pytest.mark.parametrize("part", [128, 4096])
@pytest.mark.parametrize("k", [16, 64, 128, 200, 384, 896, 1536, 2048, 3584, 5120, 8192, 12288])
def test_programs_have_a_power_of_two_of_columns_rows_and_warps(k, part, monkeypatch):
    from lit_qrl.formats.kernels import norm_triton

    launches = []

    class Kernel:
        def __init__(self, first):
            self.first = first  # constant, behind tensors and numbers

        def __getitem__(self, grid):
            return lambda *given, **options: launches.append((given[self.first :], options))

    for name, first in (("_norm", 9), ("_norm_means", 6), ("_norm_backward", 10)):
        monkeypatch.setattr(norm_triton, f"{name}_kernel", Kernel(first))
    monkeypatch.setattr(norm_triton, "PART", part)
    for widest in (norm_triton.WIDEST, 128):
        monkeypatch.setattr(norm_triton, "WIDEST", widest)
        x = torch.zeros(3, k, dtype=torch.bfloat16)
        _, y, rstd = norm_triton.norm(x, x[0], 1e-6)
        norm_triton.norm_backward(y, x, rstd, x[0])
    assert len(launches) >= 4
    for constants, options in launches:
        assert options["num_warps"] in (1, 2, 4, 8, 16)
        for size in (number for number in constants if type(number) is int):
            assert size > 0
            assert size & (size - 1) == 0


@EVERYWHERE
def test_kernels(run):
    run(compare_norm)
