"""Plain dtypes, bit by bit: rounding to bf16 is the one of `struct`'s float32 with ties to even."""

import struct

import pytest
import torch

from lit_qrl.formats.dense import BF16, FP16, FP32
from tests.formats.oracle import gemm64


def to_bf16(value):
    """The upper half of a float32, ties to even, in integers."""
    (word,) = struct.unpack("<I", struct.pack("<f", value))
    upper, lower = word >> 16, word & 0xFFFF
    upper += lower > 0x8000 or (lower == 0x8000 and upper & 1)
    return struct.unpack("<f", struct.pack("<I", upper << 16))[0]


def test_bf16_rounds_to_nearest_even():
    generator = torch.Generator().manual_seed(0)
    ties = torch.tensor([1.0 + 2**-8, 1.0 + 3 * 2**-8, -(1.0 + 2**-8), 2.0**-126, 0.0, -0.0])
    weight = torch.cat([torch.randn(58, generator=generator) * 10.0, ties]).view(8, 8)
    got = BF16().quantize(weight).codes.float().flatten().tolist()
    assert got == [to_bf16(value) for value in weight.flatten().tolist()]


@pytest.mark.parametrize("format", [BF16(), FP16(), FP32()], ids=lambda format: format.name)
def test_a_gemm_is_that_of_the_rounded_weight_in_the_input_s_dtype(format):
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(32, 64, generator=generator), torch.randn(3, 64, generator=generator)
    q = format.quantize(weight)
    got = format.linear(x, q)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), gemm64(x, weight.to(format.dtype), None), rtol=1e-5, atol=1e-5)
    assert not format.quantizes_activations
    assert format.quantization_config() == {}
    assert format.bits_per_weight == torch.finfo(format.dtype).bits
    assert format.dequantize(format.load({"weight": weight.half()}, (32, 64))).equal(weight.half().float())


def test_beyond_the_range_of_fp16_is_refused():
    largest = torch.full((2, 2), 65504.0)
    assert FP16().quantize(largest).codes.isfinite().all()
    with pytest.raises(ValueError, match="NaN or inf"):
        FP16().quantize(largest * 1.01)
    assert BF16().quantize(largest * 1.01).codes.isfinite().all()
