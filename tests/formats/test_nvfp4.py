import math

import pytest
import torch

from lit_qrl.formats import NVFP4
from tests.formats.oracle import E4M3, nearest

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def two_candidates(block, amax):
    """Each candidate's numbers and squared error by the paper's formulas (arXiv:2512.02010), in fp64."""
    found = []
    for largest in (6, 4):  # what the block's largest magnitude becomes
        alpha = 256 * 6 / amax
        scale = E4M3[nearest(E4M3, max(map(abs, block)) / 6 * alpha * (6 / largest))] / alpha
        numbers = [math.copysign(E2M1[nearest(E2M1, abs(x) / scale)] * scale, x) for x in block]
        found.append((numbers, sum((a - b) ** 2 for a, b in zip(numbers, block, strict=True))))
    return found


def test_four_over_six_takes_the_better_of_two_block_scales():
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    weight[0] *= 3.0
    amax = float(weight.abs().max())
    q = NVFP4(four_over_six=True).quantize(weight)
    assert q.global_scale.item() == pytest.approx(256 * 6 / amax)
    made, fours = NVFP4().dequantize(q).unflatten(-1, (-1, 16)), 0
    for row, blocks in enumerate(weight.unflatten(-1, (-1, 16)).double().tolist()):
        for number, block in enumerate(blocks):
            (six, error), (four, other) = two_candidates(block, amax)
            assert abs(error - other) > 1e-6 * error  # so that rounding decides nowhere
            expected = torch.tensor(four if other < error else six)
            torch.testing.assert_close(made[row, number], expected, rtol=1e-5, atol=1e-7)
            fours += other < error
    assert 4 < fours < 20


def test_four_over_six_keeps_the_layout():
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight[3], weight[5, :16] = 0.0, 0.0
    plain, better = NVFP4(), NVFP4(four_over_six=True)
    made = {format: format.quantize(weight) for format in (plain, better)}
    for name in ("codes", "scales", "global_scale"):
        one, other = (getattr(q, name) for q in made.values())
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
    assert plain.quantization_config() == better.quantization_config()
    assert made[better].scales.float().max() <= 384
    assert plain.dequantize(made[better])[3].abs().max() == 0
    stack = better.quantize_stack(torch.stack([weight, 2 * weight]))
    assert torch.equal(stack.codes[0], made[better].codes)


def nvfp4_of(token):
    """A token's numbers after one pass, in blocks of 16 under a scale of its own (QeRL eq. 6), in fp64."""
    scale_of_all = 448 * 6 / max(map(abs, token))
    made = []
    for block in (token[i : i + 16] for i in range(0, len(token), 16)):
        scale = E4M3[nearest(E4M3, max(map(abs, block)) / 6 * scale_of_all)] / scale_of_all or 0.125 / scale_of_all
        made += [math.copysign(E2M1[nearest(E2M1, abs(x) / scale)] * scale, x) for x in block]
    return made


@pytest.mark.parametrize(("share", "blocks", "error"), [(0.0, 0, 0.0944), (0.3, 3, 0.0457), (1.0, 8, 0.0086)])
def test_residual_activation_compensation_is_a_second_pass_over_the_blocks_with_the_largest_error(
    share, blocks, error, format_rows
):
    from examples.evidence_grid.four_bits import NVFP4W4A4  # which adds itself to the formats

    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.1, 3, 128)
    made = NVFP4W4A4(residual=share).dequantized_input(x)
    for token, ours in zip(x.double().tolist(), made, strict=True):
        once = nvfp4_of(token)
        left = [a - b for a, b in zip(token, once, strict=True)]
        largest = sorted(range(8), key=lambda i: -math.hypot(*left[16 * i : 16 * i + 16]))[:blocks]
        left = [r if i // 16 in largest else 0.0 for i, r in enumerate(left)]
        twice = nvfp4_of(left) if blocks else left
        expected = torch.tensor([a + b for a, b in zip(once, twice, strict=True)])
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    assert float((made - x).norm() / x.norm()) == pytest.approx(error, rel=0.02)
