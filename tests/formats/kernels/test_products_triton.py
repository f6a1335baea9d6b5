"""The FP8 products of few rows against fp64: interpreted, or compiled on a GPU."""

from itertools import product

import pytest
import torch

from tests.triton_interpreter import EVERYWHERE


def operands(m, n, k, device):
    generator = torch.Generator().manual_seed(m * n + k)
    a, b = (torch.randn(rows, k, generator=generator).to(torch.float8_e4m3fn) for rows in (m, n))
    scale_a = torch.rand(m, k // 128, generator=generator) + 0.5
    scale_b = torch.rand(n // 128, k // 128, generator=generator) + 0.5
    bias = torch.randn(n, generator=generator)
    return [one.to(device) for one in (a, scale_a, b, scale_b, bias)]


def exact(a, scale_a, b, scale_b, bias):
    spread = [scale_a, scale_b]
    if len(scale_b) != len(b):
        spread = [one.repeat_interleave(128, 1) for one in (scale_a, scale_b.repeat_interleave(128, 0))]
    a, b = (one.double() * scale.double() for one, scale in zip((a, b), spread, strict=True))
    return a @ b.T + bias.double()


def by_rows(scale_a, scale_b, b):
    """A scale for each row instead of one for each block."""
    steps = torch.arange(len(b), device=b.device)[:, None] % 3
    return scale_a[:, :1].contiguous(), scale_b[:, :1].repeat_interleave(128, 0) + steps


def compare_cuts(device):
    from lit_qrl.formats.kernels import products_triton
    from lit_qrl.formats.kernels.products_triton import Plan

    plans = [None, Plan(16, 64, 1, 4, 3), Plan(32, 128, 3, 4, 3), Plan(64, 64, 2, 4, 3), Plan(128, 64, 1, 4, 3)]
    for m, n, k in ((1, 128, 256), (37, 256, 640)):
        a, scale_a, b, scale_b, bias = operands(m, n, k, device)
        expected = exact(a, scale_a, b, scale_b, bias)
        for plan in plans:
            # row by row, or column by column as vLLM makes it; blocks as cuBLASLt has them, with columns behind them
            behind = torch.nn.functional.pad(scale_b, (0, 3))
            for scale, blocks in ((scale_a, scale_b), (scale_a.t().contiguous().t(), behind)):
                out = products_triton.product(a, scale, b, blocks, bias, torch.float32, plan)
                # a dot of FP8 numbers is exact to fp32's last bits; on tensor cores its sum keeps about 13 of them
                bound = 1e-5 if device.type == "cpu" else 2e-3
                assert (out.double() - expected).abs().max() < bound * expected.abs().max(), (m, plan)
                again = products_triton.product(a, scale, b, blocks, bias, torch.float32, plan)
                assert torch.equal(out, again)
            of_rows = by_rows(scale_a, scale_b, b)
            out = products_triton.product(a, of_rows[0], b, of_rows[1], bias, torch.float32, plan)
            wanted = exact(a, of_rows[0], b, of_rows[1], bias)
            assert (out.double() - wanted).abs().max() < bound * wanted.abs().max(), (m, plan)
        plain = products_triton.product(a, scale_a, b, scale_b, None, torch.bfloat16)
        torch.testing.assert_close(plain.double(), expected - bias.double(), rtol=2**-7, atol=0.1)
    assert not products_triton._ended(a.device).any()  # what counts parts is as the next product wants it


@EVERYWHERE
def test_kernels(run):
    run(compare_cuts)


@pytest.mark.vllm  # which brings Triton
def test_plans_cover_the_weight_once():
    from lit_qrl.formats.kernels import products_triton

    shapes = ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944), (128, 128), (1152, 896))
    for m, (n, k), by_rows in product((1, 8, 16, 17, 64, 100, 128, 129, 256, 512), shapes, (False, True)):
        how = products_triton.plan(m, n, k, by_rows)
        assert n % how.columns == 0
        assert how.columns in (64, 128)  # a program's columns have one scale
        assert how.rows in (16, 32, 64, 128)
        assert 1 <= how.parts <= k // 128  # no part is empty
        assert -(-m // how.rows) * (n // how.columns) <= products_triton.MOST_TILES or how.parts == 1
