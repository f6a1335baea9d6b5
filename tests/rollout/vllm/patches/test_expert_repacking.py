"""All experts of a layer at once become the very bits that vLLM's loop over them makes."""

from inspect import signature

import pytest
import torch

from lit_qrl.rollout.vllm.patches import expert_repacking
from lit_qrl.rollout.vllm.patches.expert_repacking import permuted_stack
from tests.operations import counted

EXPERTS, INPUTS, OUTPUTS = 3, 64, 128


def tile(codes):
    """What a kernel of tiles makes of one: any order that mixes its 16 × 64 codes of 4 bits, packed anew by 8."""
    order = torch.randperm(16 * 64, generator=torch.Generator().manual_seed(7))
    return (codes.flatten()[order].view(-1, 8) << (4 * torch.arange(8))).sum(1).to(torch.int32)


def kernel(weight, size_k, size_n):
    """Repack "in/8 out" tile by tile, as the GPU's does, into "in/16 2·out"."""
    assert weight.shape == (size_k // 8, size_n)
    assert weight.is_contiguous()
    codes = (weight[:, None, :].long() >> (4 * torch.arange(8))[None, :, None] & 15).reshape(size_k, size_n)
    rows = [torch.cat([tile(part) for part in row.split(64, 1)]) for row in codes.split(16)]
    return torch.stack(rows)


def of_integers(launches, ordered):
    """vLLM's loop: that of 0.26 has an order of inputs, that of 0.32 none."""

    def repack(b_q_weight, size_k, size_n):
        out = torch.empty((len(b_q_weight), size_k // 16, size_n * 2), dtype=torch.int32)
        for expert, weight in enumerate(b_q_weight):
            launches.append(expert)
            out[expert] = kernel(weight, size_k, size_n)
        return out

    def gptq_marlin_moe_repack_26(b_q_weight, perm, size_k, size_n, num_bits, is_a_8bit=False):
        assert len(perm) == len(b_q_weight) or perm.numel() == 0
        return repack(b_q_weight, size_k, size_n)

    def gptq_marlin_moe_repack_32(b_q_weight, size_k, size_n, num_bits, is_a_8bit=False):
        return repack(b_q_weight, size_k, size_n)

    return gptq_marlin_moe_repack_26 if ordered else gptq_marlin_moe_repack_32


def some_codes(*shape):
    return torch.randint(-(2**31), 2**31, shape, generator=torch.Generator().manual_seed(1)).to(torch.int32)


@pytest.mark.parametrize("ordered", [True, False], ids=["0.26", "0.32"])
def test_integers_are_repacked_in_one_launch(ordered):
    launches = []
    original = of_integers(launches, ordered)
    weight = some_codes(EXPERTS, INPUTS // 8, OUTPUTS)
    order = [torch.empty(EXPERTS, 0, dtype=torch.int32)] if ordered else []
    expected = original(weight, *order, INPUTS, OUTPUTS, 4)
    del launches[:]
    made = expert_repacking._of_integers(original)(weight, *order, INPUTS, OUTPUTS, 4, is_a_8bit=False)
    assert torch.equal(made, expected)
    assert made.is_contiguous()
    assert launches == [0]


def test_experts_with_an_order_of_inputs_each_go_one_by_one():
    launches = []
    original = of_integers(launches, ordered=True)
    weight, order = some_codes(EXPERTS, INPUTS // 8, OUTPUTS), torch.arange(INPUTS).expand(EXPERTS, -1)
    expert_repacking._of_integers(original)(weight, order, INPUTS, OUTPUTS, 4)
    assert launches == [0, 1, 2]


@pytest.mark.parametrize("ordered", [True, False], ids=["0.26", "0.32"])
def test_floats_are_repacked_in_one_launch(ordered):
    launches = []

    def repack(weight, size_n, size_k):
        out = []
        for expert, one in enumerate(weight):
            launches.append(expert)
            out.append(kernel(one.view(torch.int32).T.contiguous(), size_k, size_n))
        return torch.stack(out)

    def repack_26(weight, size_n, size_k, perm, is_a_8bit):
        return repack(weight, size_n, size_k)

    def repack_32(weight, size_n, size_k, is_a_8bit):
        return repack(weight, size_n, size_k)

    original, order = (repack_26, [torch.empty(0, dtype=torch.int32)]) if ordered else (repack_32, [])
    weight = some_codes(EXPERTS, OUTPUTS, INPUTS // 8).view(torch.uint8)
    expected = original(weight, OUTPUTS, INPUTS, *order, False)
    del launches[:]
    made = expert_repacking._of_floats(original)(weight, OUTPUTS, INPUTS, *order, False)
    assert torch.equal(made, expected)
    assert launches == [0]


@pytest.mark.vllm
@pytest.mark.parametrize("group_size", [16, 32, -1])
def test_scales_are_in_vllms_order(group_size):
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_moe_permute_scales

    scales = torch.randn(4, 1 if group_size < 0 else INPUTS // group_size, OUTPUTS).bfloat16()
    expected = marlin_moe_permute_scales(scales, INPUTS, OUTPUTS, group_size)
    assert torch.equal(permuted_stack(scales, INPUTS, OUTPUTS, group_size), expected)


def test_more_experts_are_no_more_launches():
    def launches(count):
        weight, scales = some_codes(count, INPUTS // 8, OUTPUTS), torch.randn(count, 2, OUTPUTS)

        def original(b_q_weight, size_k, size_n, num_bits, is_a_8bit=False):
            return torch.stack([one.reshape(size_k // 16, -1).clone() for one in b_q_weight])

        repacked = expert_repacking._of_integers(original)
        return counted(lambda: (repacked(weight, INPUTS, OUTPUTS, 4), permuted_stack(scales, INPUTS, OUTPUTS, 32)))

    assert launches(2) == launches(8)


@pytest.mark.vllm
@pytest.mark.gpu
@pytest.mark.parametrize("floats", [False, True], ids=["integers", "floats"])
def test_the_gpus_kernel_knows_no_expert(floats):
    """The bits of vLLM's own loop, which the patched process still has."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4

    owner, name = (marlin_utils_fp4, "_repack_marlin_experts") if floats else (ops, "gptq_marlin_moe_repack")
    made = getattr(owner, name)
    original = getattr(made, "lit_qrl_original", made)
    changed = (expert_repacking._of_floats if floats else expert_repacking._of_integers)(original)
    order = [torch.empty(0 if floats else (8, 0), dtype=torch.int32, device="cuda")]
    order = order if "perm" in signature(original).parameters else []
    if floats:
        weight = some_codes(8, 768, 2048 // 8).cuda().view(torch.uint8)
        given = (weight, 768, 2048, *order, False)
    else:
        given = (some_codes(8, 2048 // 8, 768).cuda(), *order, 2048, 768, 4)
    assert torch.equal(changed(*given), original(*given))


def test_a_second_engine_changes_nothing(fake):
    utils = "vllm.model_executor.layers.quantization.utils.marlin_utils_fp4"
    oracle = "vllm.model_executor.layers.fused_moe.oracle.int_wna16"

    def own(*args):
        raise AssertionError

    modules = [
        fake("vllm._custom_ops", gptq_marlin_moe_repack=own),
        fake(utils, _repack_marlin_experts=own),
        fake(oracle, marlin_moe_permute_scales=own),
    ]
    for _ in range(2):
        expert_repacking.PATCH.apply((0, 26, 0))
    changed = [next(value for value in vars(one).values() if callable(value)) for one in modules]
    assert [one.lit_qrl_original for one in changed] == [own, own, own]


def test_it_is_for_gpus():
    patch = expert_repacking.PATCH
    assert patch.concerns((0, 26, 0), "cuda")
    assert not patch.concerns((0, 32, 0), "cpu")
