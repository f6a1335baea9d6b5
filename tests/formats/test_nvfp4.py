import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8

from lit_qrl.formats import NVFP4
from tests.formats.oracle import args, compressed, same_bits, weights

CASES = list(weights(torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_codes_and_scales_are_those_of_compressed_tensors(case, dtype):
    weight = weights(dtype)[case]
    description = args(4, "float", "tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn)
    with torch.compiler.set_stance("force_eager"):
        codes, scale, global_scale = compressed(weight, description, (2,), weight.unflatten(-1, (-1, 16)))
    q = NVFP4().quantize(weight)
    assert same_bits(q.global_scale, global_scale)
    assert same_bits(q.scales, scale.to(torch.float8_e4m3fn))
    assert same_bits(q.codes, pack_fp4_to_uint8(codes))


def test_a_shared_amax_sets_the_global_scale():
    weight = torch.randn(4, 32)
    q = NVFP4().quantize(weight, shared_amax=torch.tensor(26.88))
    assert q.global_scale.item() == pytest.approx(100.0)
    assert (NVFP4().dequantize(q) - weight).abs().max() < 0.6


def test_dequantized_is_code_times_block_scale_over_global_scale():
    torch.manual_seed(0)
    q = NVFP4().quantize(torch.randn(2, 48))
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    dequantized = NVFP4().dequantize(q)
    for row in range(2):
        for column in range(48):
            code = int(q.codes[row, column // 2]) >> (4 * (column % 2)) & 15
            value = values[code & 7] * (-1 if code & 8 else 1)
            expected = value * float(q.scales[row, column // 16]) / float(q.global_scale)
            assert dequantized[row, column].item() == pytest.approx(expected, rel=1e-6)


def test_separate_global_scales_would_lose_precision_where_the_engine_keeps_one():
    """Why fused layers share the amax: vLLM multiplies each part by the largest global scale."""
    torch.manual_seed(0)
    quiet, loud = torch.randn(64, 64) * 0.01, torch.randn(64, 64)
    separate = NVFP4().quantize(quiet)
    separate.global_scale = torch.maximum(separate.global_scale, NVFP4().quantize(loud).global_scale)
    assert torch.equal(separate.global_scale, NVFP4().quantize(quiet).global_scale)  # the quiet part's is the larger
    wrong = NVFP4().quantize(loud)
    wrong.global_scale = separate.global_scale
    shared = NVFP4().quantize(loud, shared_amax=loud.abs().amax())
    error = lambda q: float((NVFP4().dequantize(q) - loud).norm() / loud.norm())  # noqa: E731
    assert error(shared) < 0.12
    assert error(wrong) > 0.9


def test_a_shape_that_does_not_fit_names_layer_shape_and_remedy():
    with pytest.raises(ValueError, match=r"mlp\.up_proj.*nvfp4.*divisible by 16.*\(32, 40\).*Exclude"):
        NVFP4().check("mlp.up_proj", (32, 40))
