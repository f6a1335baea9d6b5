import pytest
import torch

from lit_qrl import formats
from lit_qrl.formats.base import compressed_tensors_config, expect_shape
from tests.formats.oracle import bits


def test_a_format_is_shown_by_name_and_settings():
    assert str(formats.get("nvfp4")) == "nvfp4"
    assert str(formats.get("nvfp4:four_over_six")) == "nvfp4:four_over_six"
    assert str(formats.get("int4_group", activations="fp8")) == "int4_group:activations=fp8"


WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}


@pytest.mark.parametrize("ignore", [("lm_head",), ["a", "b"]])
def test_configurations_have_nothing_in_common_but_their_numbers(ignore):
    first = compressed_tensors_config("x", weights=WEIGHTS, ignore=ignore)
    first["ignore"].append("c")
    first["config_groups"]["group_0"]["weights"]["num_bits"] = 2
    again = compressed_tensors_config("x", weights=WEIGHTS, ignore=ignore)
    assert again["ignore"] == list(ignore)
    assert again["config_groups"]["group_0"]["weights"]["num_bits"] == WEIGHTS["num_bits"] == 4


def test_codes_of_another_shape_do_not_belong_to_the_layer():
    q = formats.get("fp8_row").quantize(torch.randn(4, 6))
    assert expect_shape(q, (4, 6)) is q
    with pytest.raises(ValueError, match=r"does not belong to this layer.*\(6, 4\).*Given: \(4, 6\)"):
        expect_shape(q, (6, 4))


def stack_of_experts(dtype, rows=128):
    generator = torch.Generator().manual_seed(0)
    stack = torch.randn(3, 2 * rows, 128, generator=generator) * torch.tensor([1.0, 3.0, 0.1]).view(3, 1, 1)
    return stack.to(dtype)[:, :rows]  # as gate lies beside up


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [128, 72])
@pytest.mark.parametrize("name", [*formats.names(), "fp8_tensor, shared", "nvfp4, shared"])
def test_a_stack_has_the_codes_of_its_matrices_one_by_one(name, rows, dtype):
    name, _, shared = name.partition(", ")
    format, stack = formats.get(name), stack_of_experts(dtype, rows)
    amaxes = torch.tensor([9.0, 12.0, 1.0], dtype=dtype) if shared else None
    together = format.quantize_stack(stack, amaxes)
    for index, weight in enumerate(stack):
        alone = format.quantize(weight.contiguous(), None if amaxes is None else amaxes[index])
        assert together.shape == alone.shape
        for part in ("codes", "scales", "global_scale"):
            held, expected = getattr(together, part), getattr(alone, part)
            assert (held is None) == (expected is None)
            assert held is None or held[index].shape == expected.shape
            assert held is None or torch.equal(bits(held[index]), bits(expected))
        assert torch.equal(format.dequantize_stack(together, dtype)[index], format.dequantize(alone, dtype))
