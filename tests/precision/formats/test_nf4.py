import pytest
import torch

from lit_qrl.precision.formats import NF4
from lit_qrl.precision.formats.nf4 import TABLE

from .oracle import same_bits, weights

CASES = list(weights(torch.float32))


@pytest.fixture(scope="module")
def bnb():
    import bitsandbytes.functional

    return bitsandbytes.functional


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_codes_and_scales_are_those_of_bitsandbytes(case, dtype, bnb):
    weight = weights(dtype)[case]
    codes, state = bnb.quantize_4bit(weight, blocksize=64, compress_statistics=False, quant_type="nf4")
    q = NF4().quantize(weight)
    assert same_bits(q.scales, state.absmax)
    assert same_bits(q.codes, codes)
    assert torch.equal(torch.tensor(TABLE), state.code)


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


def test_the_saved_state_is_read_back_by_bitsandbytes(bnb):
    weight = torch.randn(8, 64).bfloat16()
    q = NF4().quantize(weight)
    tensors = {key.removeprefix("x."): tensor for key, tensor in NF4().checkpoint(q, "x")}
    packed = tensors.pop("weight")
    state = bnb.QuantState.from_dict({key.removeprefix("weight."): t for key, t in tensors.items()}, device="cpu")
    assert torch.equal(bnb.dequantize_4bit(packed, state), NF4().dequantize(q, torch.bfloat16))


def test_a_shape_that_does_not_fit_names_layer_shape_and_remedy():
    with pytest.raises(ValueError, match=r"mlp\.up_proj.*nf4.*multiple of 64.*\(3, 40\).*Exclude"):
        NF4().check("mlp.up_proj", (3, 40))
