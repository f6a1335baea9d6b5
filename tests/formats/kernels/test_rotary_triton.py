import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb, rotate_half

from tests.triton_interpreter import everywhere


@everywhere
def test_rotation(device):
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
            wide, c, s = (one.float() for one in (x, cos, sin))
            plain = (wide * c[:, None] + rotate_half(wide) * s[:, None]).to(dtype)
            assert torch.equal(rotary_triton.rotate(x.detach(), cos, sin), plain.detach())
            plain.backward(grad)
            back = rotary_triton.rotate(grad, cos, sin, back=True)
            torch.testing.assert_close(back, x.grad, atol=2**-7, rtol=2**-7)


@everywhere
def test_turns_in_place(device):
    """Queries that are written over, also as a part of a wider tensor, whose rest stays."""
    from lit_qrl.formats.kernels import rotary_triton

    for heads, d in ((4, 32), (3, 16)):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(2, 7, heads, d, generator=generator).bfloat16()
        positions = torch.randint(0, 500, (2, 7), generator=generator)
        rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=heads * d, num_attention_heads=heads))
        cos, sin = rotary(x, positions)
        expected = apply_rotary_pos_emb(*(one.float() for one in (x, x, cos, sin)), unsqueeze_dim=2)[0].bfloat16()
        beside = torch.zeros(2, 7, 2, heads, d, dtype=x.dtype, device=device)
        beside[:, :, 0] = x.to(device)
        for found in (x.clone().to(device), beside[:, :, 0]):
            rotary_triton.rotate(
                found.flatten(0, 1), cos.flatten(0, 1).to(device), sin.flatten(0, 1).to(device), in_place=True
            )
            assert torch.equal(found.cpu(), expected)
        assert not beside[:, :, 1].any()
