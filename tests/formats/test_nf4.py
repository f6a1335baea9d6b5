import pytest
import torch

from lit_qrl.formats import NF4
from lit_qrl.formats.nf4 import TABLE
from tests.formats.oracle import same_bits, weights

# An fp32 number below it has an inverse beyond fp32.
SMALLEST_INVERTIBLE = 2.0**-126


@pytest.fixture
def bnb():
    import bitsandbytes.functional

    return bitsandbytes.functional


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", list(weights(torch.float32)))
def test_codes_and_scales_are_those_of_bitsandbytes(case, dtype, device, bnb):
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


def test_the_saved_state_is_read_back_by_bitsandbytes(bnb):
    weight = torch.randn(8, 64).bfloat16()
    q = NF4().quantize(weight)
    tensors = {key.removeprefix("x."): tensor for key, tensor in NF4().checkpoint(q, "x")}
    packed = tensors.pop("weight")
    state = bnb.QuantState.from_dict({key.removeprefix("weight."): t for key, t in tensors.items()}, device="cpu")
    assert torch.equal(bnb.dequantize_4bit(packed, state), NF4().dequantize(q, torch.bfloat16))
