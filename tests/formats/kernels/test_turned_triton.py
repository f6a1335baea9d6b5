import torch
from transformers.models.llama.modeling_llama import rotate_half

from tests.triton_interpreter import everywhere


def plain_turn(x, cos, sin):
    wide = [one if one.dtype == torch.float64 else one.float() for one in (x, cos, sin)]
    return (wide[0] * wide[1][:, None] + rotate_half(wide[0]) * wide[2][:, None]).to(x.dtype)


@everywhere
def test_turns(device):
    """The rows bit by bit; the gradients against kernels and sums of their own, and against autograd's in fp64."""
    from lit_qrl.formats.kernels import rotary_triton, turned_triton

    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16):
        for heads, key_heads, dim in ((3, 1, 8), (20, 2, 16), (4, 4, 80)):
            n, shared = 9, 3
            index = torch.tensor([0, 1, 2, 3, 4, 0, 1, 5, 6, 0, 2, 7, 8])
            place = torch.tensor([5, 1, 10, 3, 4, 7, 8, 11, 12])
            copies = torch.tensor([[0, 5, 9], [1, 6, -1], [2, 10, -1]])
            both = torch.randn(n, (heads + 2 * key_heads) * dim, generator=generator).to(device, dtype)
            q, k, v = (
                part.unflatten(1, (-1, dim))
                for part in both.split([heads * dim, key_heads * dim, key_heads * dim], dim=1)
            )
            cos, sin = (torch.randn(n, dim, generator=generator).to(device, dtype) for _ in range(2))
            index, place, copies = index.to(device), place.to(device), copies.to(device)
            made = turned_triton.turned(q, k, v.contiguous(), cos, sin, index)
            for found, x in zip(made, (plain_turn(q, cos, sin), plain_turn(k, cos, sin), v), strict=True):
                assert torch.equal(found, x.index_select(0, index))
            grads = [torch.randn(one.shape, generator=generator).to(device, dtype) for one in made]
            back = turned_triton.turned_back(tuple(grads), cos, sin, place, copies)
            assert back[1].data_ptr() - back[0].data_ptr() == heads * dim * 2
            for number, (found, grad) in enumerate(zip(back, grads, strict=True)):
                summed = grad.index_select(0, place)
                several = grad[copies.clamp(min=0)].float().masked_fill_((copies < 0)[..., None, None], 0.0)
                summed[:shared] = (several[:, 0] + several[:, 1] + several[:, 2]).to(dtype)
                expected = rotary_triton.rotate(summed, cos, sin, back=True) if number < 2 else summed
                assert torch.equal(found, expected)
            leaves = [one.detach().double().requires_grad_() for one in (q, k, v)]
            c, s = cos.double(), sin.double()
            rows = [
                one.index_select(0, index)
                for one in (plain_turn(leaves[0], c, s), plain_turn(leaves[1], c, s), leaves[2])
            ]
            # rows that no token is taken from have no gradient in a layout; here they are the copies' own
            torch.autograd.backward(rows, [grad.double() for grad in grads])
            for found, leaf in zip(back, leaves, strict=True):
                torch.testing.assert_close(found.double(), leaf.grad, atol=2**-5, rtol=2**-5)
