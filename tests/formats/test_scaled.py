"""What the base of the scaled formats does with what a subclass says, on a format of powers of two."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from lit_qrl import formats
from lit_qrl.formats.kernels import dispatch, gemm
from lit_qrl.formats.scaled import Scaled

SCALED = ("fp8_tensor", "fp8_row", "fp8_block", "int8_channel")


@dataclass(frozen=True)
class Halves(Scaled):
    """Integers up to 2 in units of half a row's largest weight; a device multiplies from 4 rows on."""

    native: bool = False
    name: ClassVar[str] = "halves"
    kind = "int"
    steps = 2.0

    def encode(self, quotient):
        return quotient.round().to(torch.int8)

    def has_gemm(self, device, shape):
        return self.native

    def multiply(self, x, codes, scale, bias):
        out = x.reshape(-1, x.shape[-1]) @ (codes.float() * scale).t()
        return (out if bias is None else out + bias).to(x.dtype)

    def emulate(self, rows, weight):
        return rows.float() @ weight.t()


WEIGHT = torch.tensor([[2.0, -1.0, 0.4], [0.0, -8.0, 4.5]])


@pytest.mark.parametrize(("name", "kernel"), [("fp8_row", "fp8_rows"), ("fp8_block", "fp8_blocks")])
def test_codes_of_a_kernel_are_taken_where_there_is_one(name, kernel, monkeypatch):
    format, weight = formats.get(name), torch.randn(128, 128)
    plain = format.quantize(weight)
    made = plain.codes.clone(), plain.scales * 2
    monkeypatch.setattr(dispatch, "fp8_weights", lambda given, asked: made if asked == kernel else None)
    q = format.quantize(weight)
    assert q.codes is made[0]
    assert q.scales is made[1]
    assert (q.global_scale, q.format, q.shape) == (None, format, (128, 128))
    made[1][0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaN or inf"):
        format.quantize(weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", SCALED)
def test_a_code_times_its_scale_is_rounded_once(name, dtype):
    format = formats.get(name)
    for shape in ((256, 128), (130, 144)):  # of whole blocks and of parts
        for stored in (torch.bfloat16, torch.float32):
            q = format.quantize(torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(stored))
            scales = q.scales.double()
            if name == "fp8_block":
                scales = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
            # 8 bits of code and 24 of scale fit into a double, so that the only rounding is to fp32 and then to dtype
            expected = (q.codes.double() * scales).float().to(dtype)
            assert torch.equal(format.dequantize(q, dtype), expected)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_and_bias_whoever_multiplies(native, dtype):
    x, bias = torch.tensor([[[1.0, 0.0, 2.0]], [[0.5, -1.0, 4.0]]], dtype=dtype), torch.tensor([1.0, -1.0])
    format = Halves(native)
    prepared = format.prepare(format.quantize(WEIGHT), dtype)
    assert prepared.native is native
    assert prepared.operand.dtype == (torch.int8 if native else torch.float32)
    x = x.float() if native else x
    out = format.apply(x, prepared, bias)
    assert (out.shape, out.dtype) == ((2, 1, 2), x.dtype)
    assert out.tolist() == [[[3.0, 7.0]], [[3.0, 23.0]]]


@pytest.mark.parametrize(("name", "per_token"), [("fp8_tensor", False), ("fp8_row", True)])
def test_layers_that_read_one_tensor_share_its_codes(name, per_token, monkeypatch):
    made, quantize = [], dispatch.e4m3_inputs

    def counted(rows, asked):
        assert asked is per_token
        made.append(rows)
        return quantize(rows, asked)

    monkeypatch.setattr(dispatch, "e4m3_inputs", counted)
    product = lambda codes, scale, weight, *rest: (codes.float() * scale) @ weight.float().t()  # noqa: E731
    monkeypatch.setattr(gemm, "scaled_mm", product)
    format, x = formats.get(name), torch.randn(2, 3, 32)
    weights = [format.quantize(torch.randn(16, 32)).codes for _ in range(3)]
    found = [format.multiply(x, weight, torch.ones(1), None) for weight in weights]
    assert len(made) == 1
    expected = [format.dequantized_input(x).reshape(6, 32) @ weight.float().t() for weight in weights]
    torch.testing.assert_close(found, expected)
    x.mul_(2)
    format.multiply(x, weights[0], torch.ones(1), None)
    assert len(made) == 2
