"""The fused sums against plain reductions: interpreted on a CPU, compiled on a GPU."""

import pytest
import torch

from lit_qrl.receipts.checksum import Checksums, Matrices
from tests.triton_interpreter import everywhere

# Shapes whose matrix of words is wide, narrow, and a single row.
SHAPES = ((64, 1032), (64, 72), (1, 8))


def broken(x, value):
    y = x.clone().float()
    y.view(-1)[5] = value
    return y.to(x.dtype)


@everywhere
def test_sums(device):
    from lit_qrl.receipts.checksum_triton import Sums

    sums = Sums(device)
    floats = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e8m0fnu]
    for dtype in (*floats, torch.int32, torch.uint8):
        for shape in SHAPES:
            x = (1 + 50 * torch.rand(shape, device=device)).to(dtype)
            if dtype in floats[:5]:
                x = (-x.float()).to(dtype)
            wrong = [broken(x, float("nan"))] if dtype in floats else []
            wrong += [broken(x, -float("inf"))] if dtype in floats[:4] else []
            for y in (x, *wrong):
                laid = Matrices.of(y.unsqueeze(0))
                bits = laid.bits()[0]
                assert bits.dtype == torch.int64
                *found, flag = sums.of(laid.stack, 1, *bits.shape, laid.step).tolist()
                assert found == [*bits.sum(1).tolist(), *bits.sum(0).tolist()]
                assert (flag > 0) == (y is not x)


@everywhere
def test_stacks(device):
    from lit_qrl.receipts.checksum_triton import Sums

    stack = torch.randn((3, 5, 64, 72), device=device).bfloat16()[:, 2]  # matrices apart from one another
    stack[1, 3, 3] = float("nan")
    laid = Matrices.of(stack)
    bits = laid.bits()
    each = Sums(device).of(laid.stack, *bits.shape, laid.step).view(3, -1)
    assert [int(one[-1]) > 0 for one in each] == [False, True, False]
    for index, one in enumerate(stack):
        alone = Matrices.of(one.unsqueeze(0)).bits()[0]
        assert torch.equal(each[index, :-1], torch.cat([alone.sum(1), alone.sum(0)]))


@pytest.mark.gpu
def test_both_devices_agree():
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "plain": torch.randn(3584, 896, generator=generator).bfloat16(),
        "codes": torch.randn(512, 640, generator=generator).to(torch.float8_e4m3fn),
        "bad": torch.full((64, 64), float("inf")),
        "odd": torch.randn(7, 3, generator=generator),
    }
    both = []
    for device in ("cpu", "cuda"):
        collected = Checksums()
        for name, tensor in tensors.items():
            collected.add(name, tensor.to(device))
        assert collected.first_non_finite() == "bad"
        both.append(collected.finish())
    assert both[0] == both[1]
