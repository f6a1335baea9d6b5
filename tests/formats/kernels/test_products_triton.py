"""The FP8 products of few rows against fp64: interpreted, or compiled on a GPU."""

from itertools import product

import pytest
import torch

from tests.triton_interpreter import everywhere


def operands(m, n, k, device):
    generator = torch.Generator().manual_seed(m * n + k)
    a, b = (torch.randn(rows, k, generator=generator).to(torch.float8_e4m3fn) for rows in (m, n))
    scale_a = torch.rand(m, k // 128, generator=generator) + 0.5
    scale_b = torch.rand(n // 128, k // 128, generator=generator) + 0.5
    bias = torch.randn(n, generator=generator)
    return [one.to(device) for one in (a, scale_a, b, scale_b, bias)]


def exact(a, scale_a, b, scale_b, bias):
    if len(scale_b) != len(b):
        scale_a = scale_a.repeat_interleave(128, 1)
        scale_b = scale_b[:, : b.shape[1] // 128].repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (a.double() * scale_a.double()) @ (b.double() * scale_b.double()).T + bias


@everywhere
def test_cuts(device):
    from lit_qrl.formats.kernels import products_triton
    from lit_qrl.formats.kernels.products_triton import Plan

    plans = [None, Plan(16, 64, 1, 4, 3), Plan(32, 128, 3, 4, 3), Plan(64, 64, 2, 4, 3), Plan(128, 64, 1, 4, 3)]
    for m, n, k in ((1, 128, 256), (37, 256, 640)):
        a, scale_a, b, scale_b, bias = operands(m, n, k, device)
        # a scale for each row; or for each block row by row, or column by column as vLLM makes them, and those of the
        # weight as cuBLASLt has them, with columns behind
        of_rows = scale_a[:, :1].contiguous(), torch.linspace(0.5, 1.5, n, device=device)[:, None]
        laid = scale_a.t().contiguous().t(), torch.nn.functional.pad(scale_b, (0, 3))
        for scales in ((scale_a, scale_b), laid, of_rows):
            expected = exact(a, scales[0], b, scales[1], bias)
            for plan in plans:
                out = products_triton.product(a, scales[0], b, scales[1], bias, torch.float32, plan)
                # a dot of FP8 numbers is exact to fp32's last bits; on tensor cores its sum keeps about 13 of them
                bound = 1e-5 if device.type == "cpu" else 2e-3
                assert (out.double() - expected).abs().max() < bound * expected.abs().max(), (m, plan)
                again = products_triton.product(a, scales[0], b, scales[1], bias, torch.float32, plan)
                assert torch.equal(out, again)
            plain = products_triton.product(a, scales[0], b, scales[1], None, torch.bfloat16)
            torch.testing.assert_close(plain.double(), expected - bias.double(), rtol=2**-7, atol=0.1)
    assert not products_triton._ended(a.device).any()  # what counts parts is as the next product wants it


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
