"""Norms and gated activations that hand on FP8 codes, against one operator after another: interpreted, or on a GPU."""

import pytest
import torch
from torch.nn import functional as F

from lit_qrl.formats.kernels import activations
from lit_qrl.formats.numerics import E4M3_MAX
from tests.formats.kernels import test_tiles_triton
from tests.formats.oracle import bits
from tests.triton_interpreter import run_interpreted


def compare_codes(made, by_row, case):
    """Hold codes and scales against those of the values that the same kernel gave."""
    y, codes, scales = (one.cpu() for one in made)
    if by_row:
        expected_scales = activations.dynamic_scale(y, 1, E4M3_MAX).clamp_min(1 / (448 * 512))
        expected = activations.e4m3_codes(y, expected_scales)
    else:
        expected, expected_scales = activations.e4m3_group_codes(y, 128)
        expected_scales = expected_scales.clamp_min(1e-10 / 448)
    assert torch.equal(scales, expected_scales), case
    assert torch.equal(bits(codes), bits(expected)), case


def compare_norms(device):
    from lit_qrl.rollout import codes_triton

    generator = torch.Generator().manual_seed(0)
    for k in (128, 384, 3584):
        x, residual = torch.randn(2, 5, k, generator=generator).bfloat16()
        x[3], residual[3] = 0, 0
        weight = torch.linspace(0.5, 1.5, k).bfloat16()
        for by_row in (True, False):
            for rest in (None, residual):
                held = None if rest is None else rest.clone().to(device)
                made = codes_triton.norm(x.to(device), held, weight.to(device), 1e-6, by_row)
                compare_codes(made, by_row, (k, by_row))
                total = x if rest is None else x + rest
                expected = F.rms_norm(total.float(), (k,), None, 1e-6).bfloat16() * weight
                torch.testing.assert_close(made[0].cpu(), expected, rtol=2**-7, atol=0)
                assert (made[0].cpu() == expected).float().mean() > 0.99
                assert held is None or torch.equal(held.cpu(), total)


def compare_gates(device):
    from lit_qrl.rollout import codes_triton

    generator = torch.Generator().manual_seed(0)
    for k in (128, 384, 1920):
        x = (2 * torch.randn(5, 2 * k, generator=generator)).bfloat16()
        x[2] = 0
        for by_row in (True, False):
            made = codes_triton.gated(x.to(device), by_row)
            compare_codes(made, by_row, (k, by_row))
            gate, up = x.split(k, -1)
            expected = F.silu(gate) * up
            torch.testing.assert_close(made[0].cpu(), expected, rtol=2**-7, atol=0)
            assert (made[0].cpu() == expected).float().mean() > 0.99


@pytest.mark.vllm  # which brings Triton
@pytest.mark.parametrize("part", [compare_norms, compare_gates])
def test_kernels_in_the_interpreter(part):
    run_interpreted(part, test_tiles_triton.INTERPRETED)


@pytest.mark.gpu
@pytest.mark.parametrize("part", [compare_norms, compare_gates])
def test_kernels_on_the_device(part):
    part(torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.vllm
def test_codes_are_those_of_vllm_s_operators_one_after_another():
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    from lit_qrl.rollout import codes_triton

    x = torch.randn(130, 2 * 18944, device="cuda", dtype=torch.bfloat16)
    plain = torch.empty(130, 18944, device="cuda", dtype=torch.bfloat16)
    torch.ops._C.silu_and_mul(plain, x)
    for by_row in (True, False):
        y, codes, scales = codes_triton.gated(x, by_row)
        assert torch.equal(y, plain)
        if by_row:
            expected = ops.scaled_fp8_quant(y, None, use_per_token_if_dynamic=True)
        else:
            expected = per_token_group_quant_fp8(y, 128, column_major_scales=True, use_ue8m0=False)
        assert torch.equal(scales, expected[1])
        assert scales.stride() == expected[1].stride() or by_row
        assert torch.equal(bits(codes), bits(expected[0]))
