import pytest
import torch
from torch.nn import functional as F

from lit_qrl.formats.kernels import dispatch
from tests.formats.oracle import bits
from tests.triton_interpreter import everywhere

INTERPRETED = """
import sys, pytest, torch
from tests import plain_instructions, triton_interpreter

triton_interpreter.mend_conversions()
compare = triton_interpreter.comparison(sys.argv)
for inverse in (plain_instructions.reciprocal, plain_instructions.inexact_reciprocal):
    with pytest.MonkeyPatch.context() as patch:
        plain_instructions.use(patch, inverse)
        compare(torch.device("cpu"))
print("same")
"""


@everywhere(script=INTERPRETED)
def test_tiles(device):
    """Codes and scales of every kind of number, the last digit of the approximate inverse right and wrong."""
    from lit_qrl.formats.kernels import tiles_triton

    for dtype in (torch.bfloat16, torch.float16):
        for x in inputs(dtype):
            _, along, across = tiles_triton.tiles(x.to(device), True, True)
            expected = dispatch.e4m3_tiles(x, True, True)
            for made, plain in zip((along, across), expected, strict=True):
                assert torch.equal(bits(made[0].cpu()), bits(plain[0])), (dtype, tuple(x.shape))
                assert torch.equal(made[1].cpu(), plain[1]), (dtype, tuple(x.shape))


def inputs(dtype):
    generator = torch.Generator().manual_seed(0)
    for rows in (1, 100, 128, 130):
        x = torch.randn(rows, 256, generator=generator) * torch.rand(rows, 1, generator=generator) * 10
        x[0, :128] = 0
        x[0, 7] = -0.0
        yield x.to(dtype)
    # every mantissa as the largest of a group beside every other that E4M3 tells from zero
    digits = {torch.bfloat16: 7}.get(dtype, 10)
    mantissas = 1 + torch.arange(2**digits, dtype=torch.float64) / 2**digits
    largest = mantissas[:: max(2**digits // 128, 1)]
    others = (mantissas[None] * 2.0 ** -torch.arange(12.0)[:, None]).flatten()
    columns = 128 * (others.numel() // 127)
    x = torch.zeros(128, columns, dtype=torch.float64)
    x.view(128, -1, 128)[..., :127] = others[: columns // 128 * 127].view(-1, 127)
    x = torch.minimum(x, largest[:, None])
    x.view(128, -1, 128)[..., 127] = largest[:, None]
    exponents = (-14, 0) if dtype == torch.float16 else (-133, -126, -80, 0, 90, 126)
    for exponent in exponents:
        yield (x[:, :1024] * 2.0**exponent).to(dtype)
    yield x.to(dtype)


@everywhere(script=INTERPRETED)
def test_operators(device):
    """The norm and the gated activation before the quantizer, and the backward pass of the second."""
    from lit_qrl.formats.kernels import tiles_triton

    generator = torch.Generator().manual_seed(0)
    x, other, grad = (torch.randn(70, 384, generator=generator).bfloat16() for _ in range(3))
    weight = torch.rand(384, generator=generator).bfloat16() + 0.5
    rstd = torch.rsqrt(x.float().pow(2).mean(-1) + 1e-6)
    y, along, across = tiles_triton.tiles(
        x.to(device), True, True, tiles_triton.NORM, rstd=rstd.to(device), weight=weight.to(device)
    )
    assert torch.equal(bits(y.cpu()), bits(weight * (x.float() * rstd[:, None]).bfloat16()))
    for made, plain in zip((along, across), dispatch.e4m3_tiles(y.cpu(), True, True), strict=True):
        assert torch.equal(bits(made[0].cpu()), bits(plain[0]))
    y, _, _ = tiles_triton.tiles(x.to(device), True, False, tiles_triton.GATED, other=other.to(device))
    assert torch.allclose(y.cpu().float(), (F.silu(x.float()).bfloat16() * other).float(), rtol=2.0**-7)
    options = {"before": tiles_triton.GATED, "other": other.to(device)}
    codes = tiles_triton.tiles(x.to(device), True, True, **options)[1:]
    unread = tiles_triton.tiles(x.to(device), True, True, **options, written=False)
    assert unread[0].shape == (70, 384)
    assert unread[0].isnan().all()
    for made, again in zip(codes, unread[1:], strict=True):
        assert torch.equal(bits(made[0].cpu()), bits(again[0].cpu()))
        assert torch.equal(made[1].cpu(), again[1].cpu())
    alone = tiles_triton.tiles(x.to(device), False, False, tiles_triton.GATED, other=other.to(device))
    assert torch.equal(bits(alone[0].cpu()), bits(y.cpu()))
    assert alone[1:] == (None, None)
    alone = tiles_triton.tiles(
        x.to(device), False, False, tiles_triton.NORM, rstd=rstd.to(device), weight=weight.to(device)
    )
    assert torch.equal(bits(alone[0].cpu()), bits(weight * (x.float() * rstd[:, None]).bfloat16()))
    sigmoid = torch.sigmoid(x.double())
    of_up = grad.double() * x.double() * sigmoid
    of_gate = grad.double() * other.double() * sigmoid * (1 + x.double() * (1 - sigmoid))
    side_by_side = torch.cat((x, other), dim=1).to(device)
    apart = tiles_triton.gated_backward(grad.to(device), x.to(device), other.to(device))
    over = grad.clone().to(device)
    again = tiles_triton.gated_backward(over, x.to(device), other.to(device), again=True)
    assert all(torch.equal(one, two) for one, two in zip(apart, again, strict=True))
    assert torch.allclose(over.cpu().float(), (F.silu(x.float()).bfloat16() * other).float(), rtol=2.0**-6, atol=1e-6)
    beside = tiles_triton.gated_backward(grad.to(device), *side_by_side.split(384, dim=1))
    for made, again, exact in zip(apart, beside, (of_gate, of_up), strict=True):
        assert torch.allclose(made.cpu().double(), exact, rtol=2.0**-7, atol=1e-6)
        assert torch.equal(again.cpu(), made.cpu())
    assert beside[1].data_ptr() - beside[0].data_ptr() == 384 * 2
    assert beside[0].stride() == (2 * 384, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_silu_of_every_number_is_the_module_s(dtype):
    from lit_qrl.formats.kernels import tiles_triton

    gate = torch.arange(-(2**15), 2**15).short().view(dtype).view(-1, 128).cuda()
    one = torch.ones_like(gate)
    made = tiles_triton.tiles(gate, True, False, tiles_triton.GATED, other=one)[0]
    expected = F.silu(gate)
    assert torch.equal(made.isnan(), expected.isnan())
    finite = ~expected.isnan()
    assert torch.equal(bits(made[finite]), bits(expected[finite]))


@pytest.mark.vllm
@pytest.mark.parametrize(("rows", "columns", "codes"), [(False, False, 0), (True, False, 1), (True, True, 2)])
def test_only_codes_that_are_made_are_e4m3(rows, columns, codes, monkeypatch):
    from lit_qrl.formats.kernels import tiles_triton

    class Kernel:
        def __getitem__(self, grid):
            return lambda *given, **options: launched.extend(given)

    launched = []
    monkeypatch.setattr(tiles_triton, "_tiles_kernel", Kernel())
    tiles_triton.tiles(torch.randn(4, 128), rows, columns, tiles_triton.GATED, torch.randn(4, 128))
    kinds = [given.dtype for given in launched if isinstance(given, torch.Tensor)]
    assert kinds.count(torch.float8_e4m3fn) == codes  # Triton knows none below compute capability 8.9
