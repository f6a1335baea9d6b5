import pytest
import torch
from compressed_tensors.compressors.mx_utils import compress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8

from lit_qrl.formats import MXFP4
from tests.formats.oracle import args, compressed, same_bits, weights

CASES = list(weights(torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_codes_and_scales_are_those_of_compressed_tensors(case, dtype):
    weight = weights(dtype)[case]
    description = args(4, "float", "group", group_size=32, scale_dtype=torch.uint8)
    with torch.compiler.set_stance("force_eager"):
        codes, scale, _ = compressed(weight, description, (2,), weight.unflatten(-1, (-1, 32)))
    q = MXFP4().quantize(weight)
    assert same_bits(q.scales, compress_mx_scale(scale, torch.uint8))
    assert same_bits(q.codes, pack_fp4_to_uint8(codes))


@pytest.mark.parametrize("amax,exponent", [(1.0, -2), (1.74, -2), (1.75, -1), (6.0, 0), (7.0, 1), (2.0**-100, -102)])
def test_the_scale_rounds_up_from_seven_quarters_of_a_power(amax, exponent):
    weight = torch.zeros(1, 32)
    weight[0, 7] = amax
    assert MXFP4().quantize(weight).scales.item() - 127 == exponent


def test_dequantized_is_code_times_a_power_of_two_and_the_last_byte_is_nan():
    torch.manual_seed(0)
    weight = torch.randn(2, 64)
    q = MXFP4().quantize(weight)
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    dequantized = MXFP4().dequantize(q)
    for row in range(2):
        for column in range(64):
            code = int(q.codes[row, column // 2]) >> (4 * (column % 2)) & 15
            value = values[code & 7] * (-1 if code & 8 else 1)
            assert dequantized[row, column].item() == value * 2.0 ** (int(q.scales[row, column // 32]) - 127)
    q.scales[1, 1] = 255  # OCP Microscaling 1.0, 5.4.1
    assert MXFP4().dequantize(q).isnan().tolist() == [[False] * 64, [False] * 32 + [True] * 32]


def test_a_shape_that_does_not_fit_names_layer_shape_and_remedy():
    with pytest.raises(ValueError, match=r"mlp\.up_proj.*mxfp4.*divisible by 32.*\(32, 40\).*Exclude"):
        MXFP4().check("mlp.up_proj", (32, 40))
