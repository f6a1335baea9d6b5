import pytest
import torch

from lit_qrl.formats import NF4
from lit_qrl.formats.nf4 import TABLE
from tests.formats.oracle import digest, exact_weights, same_bits, weights

# An fp32 number below it has an inverse beyond fp32.
SMALLEST_INVERTIBLE = 2.0**-126
# What `quantize_4bit` of bitsandbytes 0.50.2 made of `exact_weights` on a CPU: codes, then amaxes. The library itself
# is compared on a GPU host, since its mere presence makes every start of peft slower.
BITSANDBYTES = {
    "uniform float32": "ec537f0ad21586aa",
    "wide float32": "aceeb9dea84be403",
    "constant float32": "5150bf6227bb9c10",
    "all_zero float32": "1150a7363162b13f",
    "zero_rows float32": "3df5aee5b944a604",
    "subnormal float32": "2b1bc92ac39d34d4",
    "uniform bfloat16": "b27704cbc23ac2eb",
    "wide bfloat16": "da7a2855a756ab8d",
    "constant bfloat16": "5150bf6227bb9c10",
    "all_zero bfloat16": "1150a7363162b13f",
    "zero_rows bfloat16": "775108827808c3a5",
    "subnormal bfloat16": "309171f3613fc978",
    "uniform float16": "1c8a4f8ca50b4095",
    "wide float16": "368fcaf90ff37751",
    "constant float16": "5150bf6227bb9c10",
    "all_zero float16": "1150a7363162b13f",
    "zero_rows float16": "910325aea8596656",
    "subnormal float16": "1150a7363162b13f",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", list(exact_weights(torch.float32)))
def test_codes_and_scales_are_those_of_bitsandbytes(case, dtype):
    q = NF4().quantize(exact_weights(dtype)[case])
    assert digest(q.codes, q.scales) == BITSANDBYTES[f"{case} {str(dtype).removeprefix('torch.')}"]


@pytest.fixture
def bnb():
    import bitsandbytes.functional

    return bitsandbytes.functional


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", list(weights(torch.float32)))
def test_codes_and_scales_are_those_of_the_installed_bitsandbytes(case, dtype, device, bnb):
    weight = weights(dtype)[case].to(device)
    codes, state = bnb.quantize_4bit(weight, blocksize=64, compress_statistics=False, quant_type="nf4")
    q = NF4().quantize(weight)
    assert torch.equal(torch.tensor(TABLE), state.code.cpu())
    if device == "cpu":
        assert same_bits(q.scales, state.absmax)
        assert same_bits(q.codes, codes)
        return
    # The CUDA kernel divides by an amax of zero, or by one whose inverse overflows, and stores arbitrary codes. Those
    # blocks are defined by the CPU's: what counts is that both stand for nothing larger than the amax.
    normal = q.scales >= SMALLEST_INVERTIBLE
    assert same_bits(q.scales[normal], state.absmax[normal])
    assert same_bits(q.codes.view(len(normal), -1)[normal], codes.view(len(normal), -1)[normal])
    for values in (NF4().dequantize(q), bnb.dequantize_4bit(codes, state).float()):
        assert (values.view(len(normal), -1)[~normal].abs() <= SMALLEST_INVERTIBLE).all()


def test_codes_are_the_nearest_quantiles():
    torch.manual_seed(0)
    weight = torch.randn(4, 64)
    q = NF4().quantize(weight)
    dequantized = NF4().dequantize(q)
    for row in range(4):
        amax = weight[row].abs().max().item()
        for column in range(64):
            distances = [abs(weight[row, column].item() - value * amax) for value in TABLE]
            nearest = TABLE[distances.index(min(distances))] * amax
            assert dequantized[row, column].item() == pytest.approx(nearest, rel=1e-6)


@pytest.mark.gpu
def test_the_saved_state_is_read_back_by_bitsandbytes(bnb):
    weight = torch.randn(8, 64).bfloat16()
    q = NF4().quantize(weight)
    tensors = {key.removeprefix("x."): tensor for key, tensor in NF4().checkpoint(q, "x")}
    packed = tensors.pop("weight")
    state = bnb.QuantState.from_dict({key.removeprefix("weight."): t for key, t in tensors.items()}, device="cpu")
    assert torch.equal(bnb.dequantize_4bit(packed, state), NF4().dequantize(q, torch.bfloat16))
