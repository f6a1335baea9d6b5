import torch

from tests.triton_interpreter import EVERYWHERE


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


@EVERYWHERE
def test_kernels(run):
    run(compare)
