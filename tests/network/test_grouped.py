import pytest
import torch
from torch import nn

from lit_qrl.network.experts import ExpertStack, experts_output, one_after_another
from lit_qrl.network.grouped import can_group, grouped_product, multiplies

SHAPES = {"gate_proj": (24, 16), "up_proj": (24, 16), "down_proj": (16, 24)}
PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
COUNTS = (3, 0, 5, 1)


def rows(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_grouped_product_and_its_gradients_are_those_of_each_expert():
    ends = torch.tensor(COUNTS).cumsum(0).to(torch.int32)
    x, weight = rows(9, 16).requires_grad_(), rows(4, 24, 16, seed=1).requires_grad_()
    low = rows(4, 24, 16, seed=2)
    out = grouped_product(x, ends, lambda: low, weight)
    grad = rows(9, 24, seed=3)
    out.backward(grad)
    start = 0
    for expert, count in enumerate(COUNTS):
        part = slice(start, start + count)
        torch.testing.assert_close(out[part], x[part] @ low[expert].t())
        torch.testing.assert_close(x.grad[part], grad[part] @ low[expert])
        torch.testing.assert_close(weight.grad[expert], grad[part].t() @ x[part])
        start += count


def test_the_backward_pass_may_multiply_by_other_matrices():
    ends, x = torch.tensor([2, 4], dtype=torch.int32), rows(4, 8).requires_grad_()
    low, high = rows(2, 16, 8, seed=1), rows(2, 16, 8, seed=2)
    grouped_product(x, ends, lambda: low, None, lambda: high).sum().backward()
    torch.testing.assert_close(x.grad[:2], torch.ones(2, 16) @ high[0])


class Family(nn.Module):
    def __init__(self, biased):
        super().__init__()
        self.act_fn = nn.SiLU()
        if biased:
            self.gate_up_proj_bias, self.down_proj_bias = rows(4, 48, seed=7), rows(4, 16, seed=8)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_all_experts_at_once_make_what_they_make_one_after_another(biased, interleaved):
    stack = ExpertStack("experts", 4, PARTS, SHAPES, interleaved=interleaved)
    held = {leaf: rows(4, *shape, seed=i) for i, (leaf, shape) in enumerate(SHAPES.items())}
    hidden, weights = rows(10, 16, seed=5), rows(10, 2, seed=6).softmax(-1)
    chosen = torch.tensor([[0, 2], [2, 3], [0, 3], [2, 0], [3, 2], [0, 2], [0, 3], [3, 0], [2, 3], [0, 2]])
    module = Family(biased)

    def one(expert, matrix, x):
        return [x @ held[leaf][expert].t() for leaf in PARTS[matrix]]

    def all_of_them(matrix, x, ends):
        return [grouped_product(x, ends, lambda leaf=leaf: held[leaf]) for leaf in PARTS[matrix]]

    made = experts_output(stack, module, all_of_them, hidden, chosen, weights)
    torch.testing.assert_close(made, experts_output(stack, module, one_after_another(one), hidden, chosen, weights))


def test_a_device_is_tried_before_it_is_taken_and_a_cpu_has_the_loop():
    assert multiplies(torch.device("cpu"))
    assert not multiplies(torch.device("meta"))
    assert not can_group(ExpertStack("experts", 4, PARTS, SHAPES), rows(2, 16).bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize("empty", [False, True])
def test_on_a_gpu_in_bf16_products_and_gradients_are_those_of_the_loop(empty):
    counts = torch.tensor([0, 7, 0, 25, 1, 0, 31, 0] if empty else [8, 8, 3, 5, 9, 16, 7, 8])
    ends = counts.cumsum(0).to(torch.int32).cuda()
    total = int(counts.sum())
    made = [
        rows(*shape, seed=i).bfloat16().cuda() for i, shape in enumerate([(total, 128), (8, 256, 128), (total, 256)])
    ]
    x, weight, grad = made
    for one in (x, weight):
        one.requires_grad_()
    stack = ExpertStack("experts", 8, {"up_proj": ("up_proj",)}, {"up_proj": (256, 128)})
    assert can_group(stack, x)
    torch.empty(8, 256, 128, dtype=torch.bfloat16, device="cuda").fill_(float("nan"))  # what memory may have held
    out = grouped_product(x, ends, lambda: weight.detach(), weight)
    out.backward(grad)
    parts = x.detach().float().split(counts.tolist()), grad.float().split(counts.tolist())
    for expert, (a, g) in enumerate(zip(*parts, strict=True)):
        own = weight[expert].detach().float()
        start = int(counts[:expert].sum())
        part = slice(start, start + len(a))
        torch.testing.assert_close(out[part].float(), a @ own.t(), rtol=2**-7, atol=0.05)
        torch.testing.assert_close(x.grad[part].float(), g @ own, rtol=2**-7, atol=0.05)
        torch.testing.assert_close(weight.grad[expert].float(), g.t() @ a, rtol=2**-7, atol=0.05)
