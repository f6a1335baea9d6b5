import pytest
import torch

from lit_qrl import formats
from lit_qrl.formats.numerics import E4M3, fp4_values, pack_nibbles, to_fp4_codes
from tests.formats.oracle import bits
from tests.triton_interpreter import everywhere

TIES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -1.25, -2.5, -5.0, 0.0, -0.0, 6.0, -6.0]
ZERO_SCALE = 0.125


def plain(weight, global_scale, four_over_six=False):
    """Codes and scales as torch makes them on CUDA, where it divides by a number as it multiplies by the inverse."""
    blocks = weight.unflatten(-1, (-1, 16))
    steps = (blocks.abs().amax(dim=-1).float() * torch.tensor(1 / 6)).to(weight.dtype)
    found = []
    for factor in (1.0, 1.5) if four_over_six else (1.0,):
        scale = (global_scale * steps * factor).clamp(max=448.0).to(E4M3).float()
        scale = torch.where(scale == 0, ZERO_SCALE, scale)
        divisors = (scale / global_scale).unsqueeze(-1)
        codes = to_fp4_codes(blocks / divisors)
        error = (fp4_values(codes) * divisors - blocks).square()
        for _ in range(4):
            error = error[..., 0::2] + error[..., 1::2]
        found.append((error, codes, scale))
    error, codes, scale = found[0]
    if four_over_six:
        better = found[1][0] < error
        codes, scale = torch.where(better, found[1][1], codes), torch.where(better[..., 0], found[1][2], scale)
    return pack_nibbles(codes.flatten(-2)), scale.to(E4M3)


@everywhere
def test_codes(device):
    from lit_qrl.formats.kernels import fp4_triton

    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for rows, columns in ((8, 64), (5, 48), (130, 160)):
            weight = 3 * torch.randn(rows, columns, generator=generator)
            weight *= 2.0 ** torch.randint(-12, 1, (rows, columns // 16), generator=generator).repeat_interleave(16, 1)
            weight[0, :16], weight[1, :16] = torch.tensor(TIES), 0.0
            weight = weight.to(dtype)
            for global_scale in (torch.tensor([1.0]), 2688.0 / weight.abs().amax().float().reshape(1)):
                for four_over_six in (False, True) if rows < 100 else (False,):
                    (codes,), (scales,), bad = fp4_triton.nvfp4_blocks(
                        weight.unsqueeze(0).to(device), global_scale.to(device), ZERO_SCALE, four_over_six
                    )
                    expected = plain(weight, global_scale, four_over_six)
                    assert torch.equal(bits(scales.cpu()), bits(expected[1]))
                    assert torch.equal(codes.cpu(), expected[0])
                    assert bad.item() == 0
    for wrong in (float("nan"), float("inf"), float("-inf")):
        weight = torch.ones(40, 64, dtype=torch.bfloat16)
        weight[39, 63] = wrong
        assert fp4_triton.nvfp4_blocks(weight.unsqueeze(0).to(device), torch.ones(1).to(device), ZERO_SCALE)[2].isnan()


@everywhere
def test_stacks(device):
    from lit_qrl.formats.kernels import fp4_triton

    stack = torch.randn(3, 10, 48, generator=torch.Generator().manual_seed(0)).bfloat16()  # 30 blocks each
    stack[1] *= 30.0
    stack[2, 4, 4] = float("nan")
    global_scales = torch.tensor([700.0, 20.0, 5.0])
    codes, scales, bad = fp4_triton.nvfp4_blocks(stack.to(device), global_scales.to(device), ZERO_SCALE)
    assert bad.isnan().tolist() == [False, False, True]
    for index in range(2):
        expected = plain(stack[index], global_scales[index])
        assert torch.equal(codes[index].cpu(), expected[0])
        assert torch.equal(bits(scales[index].cpu()), bits(expected[1]))


@pytest.mark.gpu
@pytest.mark.parametrize("four_over_six", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_format_makes_the_codes_of_the_plain_operations(dtype, four_over_six, monkeypatch):
    from lit_qrl.formats.kernels import dispatch

    weight = torch.randn(256, 512, device="cuda").to(dtype)
    format = formats.get("nvfp4", four_over_six=four_over_six)
    made = format.quantize(weight)
    monkeypatch.setattr(dispatch, "available", lambda x, kernel: False)
    expected = format.quantize(weight)
    assert torch.equal(made.codes, expected.codes)
    assert torch.equal(bits(made.scales), bits(expected.scales))
    assert torch.equal(made.global_scale, expected.global_scale)
