"""The kernel that turns queries and keys against the library's operations: interpreted, or compiled on a GPU."""

import pytest
import torch
from transformers.models.llama.modeling_llama import rotate_half

from tests.triton_interpreter import run_interpreted


def compare_rotation(device):
    """The result bit by bit, the gradient against autograd's; heads that are not contiguous too."""
    from lit_qrl.formats.kernels import rotary_triton

    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16):
        for n, heads, dim in ((7, 3, 8), (5, 12, 80), (3, 28, 128)):
            both, grad, cos, sin = (
                torch.randn(shape, generator=generator).to(device, dtype)
                for shape in ((n, heads + 2, dim), (n, heads, dim), (n, dim), (n, dim))
            )
            x = both[:, 1:-1].detach().requires_grad_()
            plain = x * cos[:, None] + rotate_half(x) * sin[:, None]
            assert torch.equal(rotary_triton.rotate(x.detach(), cos, sin), plain.detach())
            plain.backward(grad)
            back = rotary_triton.rotate(grad, cos, sin, back=True)
            torch.testing.assert_close(back, x.grad, atol=2**-7, rtol=2**-7)


@pytest.mark.vllm
def test_the_interpreted_kernel_rounds_as_the_plain_operations_do():
    run_interpreted(compare_rotation)


@pytest.mark.gpu
def test_the_kernel_rounds_as_the_plain_operations_do():
    compare_rotation(torch.device("cuda"))
