"""MXFP8 against a loop in Python that was written from OCP Microscaling 1.0."""

import math

import pytest
import torch
from compressed_tensors.compressors.mx_utils import decompress_mx_scale

from lit_qrl.errors import ConfigError
from lit_qrl.formats import MXFP8
from lit_qrl.precision.packed_lora import PackedLoRA
from lit_qrl.rollout.vllm.checks import check_format
from tests.formats.oracle import E4M3, gemm64, nearest, ulps, weights


def of_the_specification(block):
    """A block of 32 as floats: its exponent (6.3), and what its elements stand for."""
    amax = max(abs(x) for x in block)
    exponent = max(math.frexp(amax)[1] - 1 - 8, -127) if amax else -127
    values = []
    for x in block:
        size = min(abs(x) * 2.0**-exponent, 448.0)
        values.append(math.copysign(E4M3[nearest(E4M3, size)] * 2.0**exponent, x))
    return exponent, values


def of_the_matrix(matrix):
    rows = [of_the_specification(block) for block in matrix.double().reshape(-1, 32).tolist()]
    values = torch.tensor([values for _, values in rows], dtype=torch.float64)
    return torch.tensor([exponent for exponent, _ in rows]), values.view(matrix.shape)


# Between two E4M3 numbers, halfway, below the smallest, at the largest, beyond it, and zeros of both signs.
EDGES = [17.0, 19.0, 2.0**-10, 3 * 2.0**-10, 2.0**-11, 440.0, 448.0, 464.0, 500.0, 511.5, -463.9, -17.0, 0.0, -0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["edges", *weights(torch.float32, (8, 64))])
def test_a_block_is_what_the_specification_says(case, dtype):
    edges = torch.tensor(EDGES + [0.0] * 18) * torch.tensor([[1.0], [2.0**-8], [2.0**6], [0.0]])
    weight = edges.to(dtype) if case == "edges" else weights(dtype, (8, 64))[case]
    exponents, values = of_the_matrix(weight)
    q = MXFP8().quantize(weight)
    assert q.scales is not None
    assert torch.equal(q.scales.flatten().int() - 127, exponents.int())
    assert torch.equal(MXFP8().dequantize(q).double(), values)
    assert torch.equal(MXFP8().dequantize(q).signbit(), weight.signbit())
    assert torch.equal(q.codes.double() * decompress_mx_scale(q.scales).double().repeat_interleave(32, 1), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_is_the_product_of_both_rounded(dtype):
    torch.manual_seed(0)
    weight, bias = torch.randn(48, 96).to(dtype), torch.randn(48).to(dtype)
    x = (torch.randn(2, 5, 96) * torch.rand(2, 5, 96) ** 4 * 10).to(dtype)
    out = MXFP8().linear(x, MXFP8().quantize(weight), bias)
    left, right = of_the_matrix(x.view(10, 96))[1], of_the_matrix(weight)[1]
    assert (out.shape, out.dtype) == ((2, 5, 48), dtype)
    assert ulps(out.view(10, 48), gemm64(left, right, bias), left.abs() @ right.abs().t()).max() <= 1.0


def test_an_input_that_is_not_finite_is_not_hidden():
    x = torch.ones(3, 64)
    x[0, 3], x[1, 40] = math.nan, -math.inf
    out = MXFP8().dequantized_input(x)
    assert out.isnan().tolist() == [[True] * 32 + [False] * 32, [False] * 64, [False] * 64]
    assert out[1, 40] == -math.inf
    assert torch.equal(out[2], x[2])


def test_what_nobody_serves_in_it_is_refused():
    with pytest.raises(ConfigError, match=r"no kernel for publisher\.format mxfp8.*TransformersEngine"):
        check_format(MXFP8())
    with pytest.raises(ConfigError, match="mxfp8"):
        PackedLoRA("mxfp8")
    with pytest.raises(ConfigError, match=r"mlp\.up_proj.*mxfp8.*divisible by 32.*\(32, 40\).*Exclude"):
        MXFP8().check("mlp.up_proj", (32, 40))
