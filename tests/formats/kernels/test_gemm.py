"""When a device's GEMM may be used, and how operands are laid out and padded for it; the products: test_gpu.py."""

import pytest
import torch

from lit_qrl.formats.kernels import gemm

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture
def device(monkeypatch):
    def pretend(capability, cuda="12.9"):
        monkeypatch.setattr(gemm, "capability", lambda index: capability)
        monkeypatch.setattr(torch.version, "cuda", cuda)

    return pretend


@pytest.mark.parametrize(
    ("capability", "shape", "fp8", "blocks", "int8"),
    [
        ((7, 5), (256, 256), False, False, False),
        ((8, 0), (256, 256), False, False, True),
        ((8, 9), (256, 256), True, False, True),
        ((9, 0), (256, 256), True, True, True),
        ((9, 0), (256, 144), True, False, True),
        ((9, 0), (256, 136), False, False, True),
        ((9, 0), (252, 256), False, False, False),
        ((10, 0), (256, 256), True, False, True),
    ],
)
def test_which_gemm_a_device_has_for_a_shape(device, capability, shape, fp8, blocks, int8):
    device(capability)
    found = gemm.fp8_gemm(CUDA, shape), gemm.fp8_block_gemm(CUDA, shape), gemm.int8_gemm(CUDA, shape)
    assert found == (fp8, blocks, int8)
    assert not any(has(CPU, shape) for has in (gemm.fp8_gemm, gemm.fp8_block_gemm, gemm.int8_gemm))


@pytest.mark.parametrize(("cuda", "expected"), [("12.8", False), ("12.9", True), ("13.0", True), (None, False)])
def test_block_scaling_came_with_a_version_of_cuda(device, cuda, expected):
    device((9, 0), cuda)
    assert gemm.fp8_block_gemm(CUDA, (256, 256)) is expected


@pytest.mark.parametrize("columns", [1, 3, 4, 5])
def test_block_scales_lie_column_by_column_padded_to_four(columns):
    scale = torch.rand(3, columns)
    laid = gemm.block_scale_layout(scale)
    padded = -(-columns // 4) * 4
    assert laid.shape == (padded, 3)
    assert laid.stride() == (1, padded)
    for i in range(padded):
        for j in range(3):
            assert laid[i, j] == (scale[j, i] if i < columns else 1)


@pytest.mark.parametrize("rows", [1, 16, 17, 40])
def test_few_rows_of_integers_are_padded_and_cut_again(rows):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-128, 128, (n, 16), generator=generator).to(torch.int8) for n in (rows, 24))
    got = gemm.int_mm(a, b)
    assert got.dtype == torch.int32
    expected = [[sum(int(x) * int(y) for x, y in zip(p, q, strict=True)) for q in b.tolist()] for p in a.tolist()]
    assert got.tolist() == expected


def test_rows_of_a_block_product_are_padded_until_they_are_settled(monkeypatch):
    seen = []

    def product(a, scale_a, b, scale_b, dtype, blocks):
        seen.append((tuple(a.shape), tuple(scale_a.shape), scale_a.stride(0)))
        assert scale_a[a.shape[0] - 1].eq(1 if a.shape[0] > 5 else scale_a[-1]).all()
        return a.float() @ b.float().t()

    monkeypatch.setattr(gemm, "block_product", product)
    a = torch.randn(5, 128).to(torch.float8_e4m3fn)
    b = torch.randn(8, 128).to(torch.float8_e4m3fn)
    bias = torch.randn(8)
    for settled, rows in ((0, 8), (16, 16), (6, 8), (7, 8)):  # to a multiple of four at least
        monkeypatch.setattr(gemm, "settled_rows", lambda *args, settled=settled: settled)
        out = gemm.scaled_mm_block(a, torch.rand(5, 1), b, torch.rand(4, 1), bias, torch.float32)
        assert torch.equal(out, a.float() @ b.float().t() + bias)
        assert seen.pop() == ((rows, 128), (rows, 1), 1)


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("k", [128, 256, 512, 640])
def test_scales_lie_as_the_product_asks(k, blocks, monkeypatch):
    """torch takes no other strides than these, of a single block of columns either."""
    asked = []

    def product(a, b, scale_a, recipe_a, scale_b, recipe_b, output_dtype):
        (m, _), n = a.shape, b.shape[1]
        width = 4 * (-(-k // 512))
        whole = recipe_b == gemm.F.ScalingType.BlockWise128x128
        shapes = {scale_a: ((m, k // 128), m), scale_b: ((width, n // 128), width) if whole else ((n, k // 128), n)}
        for scale, (shape, stride) in shapes.items():
            assert tuple(scale.shape) == shape
            assert scale.stride(0) == 1
            assert scale.stride(1) == stride or (scale.shape[1] == 1 and scale.stride(1) == 1)
        asked.append(m)
        return torch.zeros(m, n, dtype=output_dtype)

    monkeypatch.setattr(gemm.F, "scaled_mm", product)
    gemm._settled_rows.cache_clear()
    assert gemm.settled_rows(256, k, torch.device("cpu"), torch.float32) == gemm._ROW_STEPS[0]
    assert asked == [gemm._ROW_STEPS[-1], *reversed(gemm._ROW_STEPS[:-1])]
    gemm._settled_rows.cache_clear()
    monkeypatch.setattr(gemm, "settled_rows", lambda *args: 0)
    a, b = (torch.zeros(rows, k, dtype=torch.float8_e4m3fn) for rows in (70, 256))
    scales = torch.rand(70, k // 128), torch.rand(k // 128, 70).t(), torch.rand(k // 128, 96).t()[:70]
    for scale_a in scales:
        scale_b = gemm.block_scale_layout(torch.rand(2, k // 128)) if blocks else torch.rand(256, k // 128)
        gemm.scaled_mm_block(a, scale_a, b, scale_b, None, torch.float32, blocks)
        assert asked[-1] == 72  # in fours
        gemm.scaled_mm_block(a[:64], scale_a[:64], b, scale_b, None, torch.float32, blocks)
        assert asked[-1] == 64


@pytest.mark.parametrize(("differs_below", "expected"), [(0, 1), (5, 16), (17, 64), (64, 64), (65, 0)])
def test_the_smallest_number_of_rows_that_settles(differs_below, expected):
    def product(rows):
        return torch.full((rows,), float(rows >= differs_below))

    assert gemm.smallest_settled(product, (1, 16, 64, 256)) == (expected if differs_below <= 64 else 0)


@pytest.mark.parametrize("shape", [(512, 1), (4, 3), (1, 4), (16, 8)])
def test_scales_lie_column_by_column_with_the_strides_that_the_product_asks_for(shape):
    scale = torch.rand(shape)
    for given in (scale, scale.t().contiguous().t(), torch.rand(512, 8)[: shape[0], : shape[1]]):
        found = gemm._column_major(given)
        assert found.stride() == (1, shape[0])
        assert torch.equal(found, given)
