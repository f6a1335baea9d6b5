"""What a format gets from the contract when it says how to quantize and dequantize, and nothing else."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from lit_qrl import formats
from lit_qrl.formats.base import NumberFormat, QuantizedWeight, compressed_tensors_config, expect_shape
from tests.formats.oracle import bits
from tests.operations import counted


@dataclass(frozen=True)
class Signs(NumberFormat):
    """Signs times the mean magnitude of a row."""

    name: ClassVar[str] = "signs"
    floor: float = 0.0

    def quantize(self, weight, shared_amax=None):
        scale = weight.abs().mean(dim=1, keepdim=True).clamp(min=self.floor)
        return QuantizedWeight(weight.sign().to(torch.int8), scale, None, self, tuple(weight.shape))

    def dequantize(self, q, dtype=torch.float32):
        return (q.codes * q.scales).to(dtype)

    def export(self, q, name):
        yield f"{name}.weight", q.codes
        yield f"{name}.weight_scale", q.scales

    def load(self, tensors, shape):
        return QuantizedWeight(tensors["weight"], tensors["weight_scale"], None, self, shape)

    def quantization_config(self, ignore=("lm_head",)):
        return {"ignore": list(ignore)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_only_format_multiplies_by_what_it_dequantizes(dtype):
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(4, 6, generator=generator), torch.randn(2, 3, 6, generator=generator).to(dtype)
    bias = torch.randn(4, generator=generator).to(dtype)
    format = Signs()
    got = format.linear(x, format.quantize(weight), bias)
    assert (got.shape, got.dtype) == ((2, 3, 4), dtype)
    for i in range(2):
        for j in range(3):
            for row in range(4):
                mean = sum(abs(float(w)) for w in weight[row]) / 6
                signs = [(w > 0) - (w < 0) for w in weight[row].tolist()]
                scale = float(torch.tensor(mean).to(dtype))
                exact = sum(s * float(v) for s, v in zip(signs, x[i, j], strict=True)) * scale + float(bias[row])
                assert float(got[i, j, row]) == pytest.approx(
                    exact, rel=0.02 if dtype == torch.bfloat16 else 1e-5, abs=0.02
                )


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
    q = Signs().quantize(torch.randn(4, 6))
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


def test_a_stack_is_quantized_in_the_operations_of_one_matrix():
    stack = stack_of_experts(torch.bfloat16).repeat(5, 1, 1)
    for name in ("fp8_row", "fp8_block", "fp8_tensor", "int4_group", "int8_channel", "nvfp4", "mxfp4", "int3_channel"):
        format = formats.get(name)
        assert counted(lambda f=format: f.quantize_stack(stack)) <= counted(lambda f=format: f.quantize(stack[0])) + 8
