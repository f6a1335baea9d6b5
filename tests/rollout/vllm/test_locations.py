"""Where tensors lie in modules, with stand-ins for vLLM's."""

import pytest
import torch
from torch import nn

from lit_qrl.receipts.checksum import slices
from lit_qrl.rollout.vllm.locations import ExpertPlace, Place, copy_all, loaded_format, whole_experts
from tests.operations import counted


def expert(number, part=0, beside=1, **more):
    return ExpertPlace("experts", nn.Module(), "w13_weight", part, expert=number, beside=beside, **more)


def test_scales_of_an_expert_lie_like_its_matrices():
    assert expert(1, 3, 2).cut(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), (1,)).tolist() == [4]
    assert expert(1).cut(torch.tensor([1.0, 2.0]), ()).item() == 2
    rows = torch.arange(2 * 4.0).view(2, 4, 1)
    assert torch.equal(expert(1, 2, 2).cut(rows, (2, 1)), rows[1, :2])
    turned = torch.arange(2 * 3 * 8.0).view(2, 3, 8)  # "experts in out"
    assert torch.equal(expert(1, 3, 2, turned=True).cut(turned, (4, 3)), turned[1, :, 4:].t())


def test_experts_are_whole_when_all_came_with_all_that_came_of_any():
    def places(leaves, attribute):
        parts = tuple(f"{number}.{leaf}" for number in range(2) for leaf in leaves)
        return [ExpertPlace("experts", nn.Module(), attribute, part, parts) for part in range(len(parts))]

    codes = [*places(("gate", "up"), "w13_weight"), *places(("down",), "w2_weight")]
    scales = [*places(("gate", "up"), "w13_weight_scale"), *places(("down",), "w2_weight_scale")]
    assert whole_experts(codes)
    assert whole_experts([*codes, *scales])
    assert not whole_experts([*codes, *scales[:-1]])
    assert not whole_experts([*codes, *scales[:4]])
    assert not whole_experts([*codes, Place("experts", nn.Module(), "w2_weight")])
    assert not whole_experts([])


def made(name, **attributes):
    return type(name, (), attributes)()


@pytest.mark.parametrize(
    ("method", "scheme", "expected"),
    [
        (None, None, "bf16"),
        (made("CompressedTensorsLinearMethod"), made("CompressedTensorsWNA16", num_bits=8), "CompressedTensorsWNA16"),
        (made("CompressedTensorsW8A8Fp8MoEMethod", weight_quant=made("Args", strategy="channel")), None, "fp8_row"),
        (made("CompressedTensorsWNA16MarlinMoEMethod", weight_quant=made("Args", num_bits=4)), None, "int4_group"),
        (made("CompressedTensorsW4A4Nvfp4MoEMethod"), None, "nvfp4"),
        (made("AWQMarlinMethod"), None, "AWQMarlinMethod"),  # unknown: by its own name, never as something it is not
    ],
)
def test_the_format_of_experts_and_of_what_is_unknown_is_read_from_the_method(method, scheme, expected):
    module = nn.Module()
    if method is not None:
        module.quant_method = method
    if scheme is not None:
        module.scheme = scheme
    assert loaded_format(module, torch.bfloat16) == expected


@pytest.mark.parametrize("shards", [(), (0, 1, 2)])
def test_one_number_of_a_layer_that_the_checkpoint_fuses_reaches_all_its_widths(shards):
    module = torch.nn.Linear(1, 1)
    module.output_sizes = [2, 1, 1] if not shards else [2, 1, 1, 4]
    parts = ("in_qkv", "in_z") if shards else ()
    place = Place("fused", module, "weight_scale", 0, parts, shards)
    scales = torch.tensor([0.5, *[7.0] * (len(module.output_sizes) - 1)])
    place.spread(scales, (1,))
    assert scales.tolist() == ([0.5, 0.5, 0.5] if not shards else [0.5, 0.5, 0.5, 7.0])
    assert place.cut(scales, (1,)).tolist() == [0.5]
    rows = torch.arange(3.0)  # a scale for each row is no such number
    place.spread(rows, (3,))
    assert rows.tolist() == [0, 1, 2]


def test_a_part_of_several_widths_has_the_rows_of_all_of_them():
    module = torch.nn.Linear(1, 1)
    module.output_sizes = [2, 2, 3, 1]
    weight = torch.arange(16.0).view(8, 2)
    first = Place("fused", module, "weight", 0, ("in_qkv", "in_z"), (0, 1, 2))
    second = Place("fused", module, "weight", 1, ("in_qkv", "in_z"), (3,))
    assert torch.equal(first.cut(weight, (7, 2)), weight[:7])
    assert torch.equal(second.cut(weight, (1, 2)), weight[7:])
    assert (first.span(8), second.span(8)) == ((0, 7), (7, 8))


def test_whole_stacks_are_copied_at_once_and_single_tensors_where_they_belong():
    source, target = torch.randn(6, 4, 5), torch.zeros(6, 8, 5)
    to = slices(target[:, 4:])
    assert counted(lambda: copy_all(zip(to, slices(source), strict=True))) == 1
    assert torch.equal(target[:, 4:], source)
    copy_all(zip(to[2:], slices(3 * source[:4]), strict=True))  # what a launch made of some of the experts
    assert torch.equal(target[2:, 4:], 3 * source[:4])
    sent = slices(5 * source)
    swapped = [sent[1], sent[0], *sent[2:]]
    copy_all(zip(to, swapped, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(to, swapped, strict=True))
    copy_all([(to[0], torch.ones(4, 5)), *zip(to[1:], slices(7 * source)[1:], strict=True)])
    assert torch.equal(target[0, 4:], torch.ones(4, 5))
    assert torch.equal(target[1:, 4:], 7 * source[1:])
    assert not target[:, :4].any()
