import torch

from tests.triton_interpreter import everywhere


@everywhere
def test_kernel(device):
    from lit_qrl.formats.kernels import transposed_triton

    generator = torch.Generator().manual_seed(0)
    for shape in ((128, 128), (256, 384), (1, 7), (130, 70), (16, 300)):
        codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(device)
        for dtype in (torch.uint8, torch.float8_e4m3fn):
            turned = transposed_triton.transposed(codes.view(dtype))
            assert turned.dtype == dtype
            assert turned.shape == shape[::-1]
            assert torch.equal(turned.view(torch.uint8), codes.t())
