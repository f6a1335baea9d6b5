"""Sums of gathered rows in one kernel, against sums in double: interpreted, or compiled on a GPU."""

import pytest
import torch

from tests.triton_interpreter import run_interpreted


def compare(device):
    from lit_qrl.formats.kernels import rows_triton

    torch.manual_seed(0)
    copies = torch.tensor([[3, 0, 6], [1, -1, -1], [2, 5, -1]], device=device)
    place = torch.tensor([0, 1, 2, 7, 4], device=device)
    for shape in ((8, 2, 40), (8, 3, 1024)):
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.randn(shape).to(dtype)
            exact = [sum(x[at].double() for at in row if at >= 0) for row in copies.tolist()]
            made = rows_triton.summed(x.to(device), place, copies).cpu()
            assert made.dtype == dtype
            torch.testing.assert_close(made[:3], torch.stack(exact).to(dtype), atol=1e-6, rtol=2**-7)
            assert torch.equal(made[3:], x[[7, 4]])
            assert torch.equal(made[1], x[1])
    index = torch.tensor([0, 1, 2, 1, 3, 0], device=device)  # the last is padding
    gathered = torch.tensor([0, 3, 2, 4], device=device)
    for shape in ((4, 2, 40), (4, 3, 1024)):
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.randn(shape).to(dtype)
            made = rows_triton.returned(x.to(device), index, gathered).cpu()
            assert torch.equal(made, x.new_zeros(6, *shape[1:]).index_copy_(0, gathered.cpu(), x))
    for shape in ((3, 40), (2, 5000), (1, 2048)):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            x, row = torch.randn(shape).to(dtype), torch.randn(shape[1]).to(dtype)
            given = x.clone().to(device)
            assert rows_triton.added_to_each(given, row.to(device)) is given
            assert torch.equal(given.cpu(), x + row)


@pytest.mark.vllm  # which brings Triton
def test_kernel_in_the_interpreter():
    run_interpreted(compare)


@pytest.mark.gpu
def test_kernel_on_the_device():
    compare(torch.device("cuda"))
