"""The bound on what a product with a unit vector rounds: it holds what kernels do, and not much more."""

import pytest
import torch

from lit_qrl.receipts.rounding import share_of_bound


def fma_products(codes, scale, scale_2, dtype):
    """A unit vector times codes and two scales, as the least careful kernel does it: rounded after every factor."""
    return ((codes.to(dtype) * scale.to(dtype)) * scale_2.to(dtype)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 2.0**-12, 2.0**-20])  # the last are subnormal numbers of fp16
def test_bound_holds_what_rounding_does_and_not_much_more(dtype, size):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-7, 8, (256, 64), generator=generator).float()
    scale = (0.5 + torch.rand(256, 1, generator=generator)).to(dtype).float()
    scale_2 = (size * (1 + torch.rand(1, 1, generator=generator))).to(dtype).float()
    weight = codes * (scale * scale_2)
    share = share_of_bound(fma_products(codes, scale, scale_2, dtype), weight, exact=False)
    assert 0.1 < share.max() <= 1
    if size == 1:
        off = share_of_bound(
            fma_products(codes, scale * (1 + 20 * torch.finfo(dtype).eps), scale_2, dtype), weight, False
        )
        assert off[codes != 0].min() > 1


def test_bound_of_plain_weights_allows_for_numbers_that_matrix_units_take_for_zero():
    weight = torch.tensor([[1.0, 2.0**-130, 0.0]])
    flushed = torch.where(weight.abs() < 2.0**-126, 0, weight)
    assert share_of_bound(flushed, weight, exact=True).max() < 1
    assert share_of_bound(flushed.bfloat16(), weight, exact=True).max() < 1
    assert share_of_bound(torch.zeros(1, 3), weight, exact=True).max() > 1
    assert share_of_bound(torch.tensor([[float("nan"), float("inf"), 0.0]]), weight, exact=True)[0, :2].min() > 1


def test_bound_follows_the_digits_in_which_torch_multiplies_fp32(monkeypatch):
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    short = weight.bfloat16()
    assert share_of_bound(short.float(), weight, exact=True).max() > 1
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    assert 0.4 < share_of_bound(short.float(), weight, exact=True).max() <= 1
    assert share_of_bound(short, weight, exact=True).max() > 1  # bf16 is multiplied as it is
