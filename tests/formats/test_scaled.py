import pytest
import torch

from lit_qrl import formats
from lit_qrl.formats.kernels import dispatch, gemm

SCALED = ("fp8_tensor", "fp8_row", "fp8_block", "int8_channel")


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_and_bias_whoever_multiplies(dtype, monkeypatch):
    format, x, bias = formats.get("int8_channel"), torch.randn(2, 20, 64).to(dtype), torch.randn(48)
    q = format.quantize(torch.randn(48, 64))
    emulated = format.linear(x, q, bias)
    monkeypatch.setattr(type(format), "has_gemm", lambda *_: True)  # whose product of integers runs here too
    prepared = format.prepare(q, dtype)
    assert prepared.native
    assert prepared.operand.dtype == torch.int8
    torch.testing.assert_close(format.apply(x, prepared, bias), emulated)


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
