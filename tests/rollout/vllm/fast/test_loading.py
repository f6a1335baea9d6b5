"""Repacking at once, and ahead of the device, makes the very bits that vLLM's own makes."""

import importlib
import importlib.util
from inspect import signature
from types import SimpleNamespace

import pytest
import torch
from lit_qrl_vllm_fast import loading
from torch import nn

from lit_qrl.rollout.vllm.patches import find
from tests.operations import counted

PATCHES = {one.name: one for one in loading.CHANGES}
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


def vllms(launches, floats, ordered):
    """vLLM's loop over experts, of integers or of floats: that of 0.26 has an order of inputs, that of 0.32 none."""

    def repack(weight, size_k, size_n):
        out = []
        for expert, one in enumerate(weight):
            launches.append(expert)
            out.append(kernel(one.view(torch.int32).T.contiguous() if floats else one, size_k, size_n))
        return torch.stack(out)

    def integers_26(b_q_weight, perm, size_k, size_n, num_bits, is_a_8bit=False):
        return repack(b_q_weight, size_k, size_n)

    def integers_32(b_q_weight, size_k, size_n, num_bits, is_a_8bit=False):
        return repack(b_q_weight, size_k, size_n)

    def floats_26(weight, size_n, size_k, perm, is_a_8bit):
        return repack(weight, size_k, size_n)

    def floats_32(weight, size_n, size_k, is_a_8bit):
        return repack(weight, size_k, size_n)

    return ((integers_32, integers_26), (floats_32, floats_26))[floats][ordered]


def some_codes(*shape):
    return torch.randint(-(2**31), 2**31, shape, generator=torch.Generator().manual_seed(1)).to(torch.int32)


def arguments(floats, ordered, experts, inputs, outputs, device="cpu"):
    """What vLLM's loop and ours are given."""
    order = [torch.empty(0 if floats else (experts, 0), dtype=torch.int32, device=device)] * ordered
    if floats:
        weight = some_codes(experts, outputs, inputs // 8).to(device).view(torch.uint8)
        return weight, outputs, inputs, *order, False
    return some_codes(experts, inputs // 8, outputs).to(device), *order, inputs, outputs, 4


def at_once(floats):
    return loading.floats_at_once if floats else loading.integers_at_once


@pytest.mark.parametrize("floats", [False, True], ids=["integers", "floats"])
@pytest.mark.parametrize("ordered", [True, False], ids=["0.26", "0.32"])
def test_a_stack_is_repacked_in_one_launch(floats, ordered):
    launches = []
    original, given = vllms(launches, floats, ordered), arguments(floats, ordered, EXPERTS, INPUTS, OUTPUTS)
    expected = original(*given)
    del launches[:]
    made = at_once(floats)(original)(*given)
    assert torch.equal(made, expected)
    assert made.is_contiguous()
    assert launches == [0]


def test_experts_with_an_order_of_inputs_each_go_one_by_one():
    launches = []
    original = vllms(launches, floats=False, ordered=True)
    weight, order = some_codes(EXPERTS, INPUTS // 8, OUTPUTS), torch.arange(INPUTS).expand(EXPERTS, -1)
    loading.integers_at_once(original)(weight, order, INPUTS, OUTPUTS, 4)
    assert launches == [0, 1, 2]


@pytest.mark.vllm
@pytest.mark.parametrize("group_size", [16, 32, -1])
def test_scales_are_in_vllms_order(group_size):
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_moe_permute_scales

    scales = torch.randn(4, 1 if group_size < 0 else INPUTS // group_size, OUTPUTS).bfloat16()
    expected = marlin_moe_permute_scales(scales, INPUTS, OUTPUTS, group_size)
    assert torch.equal(loading.permuted_stack(scales, INPUTS, OUTPUTS, group_size), expected)


def test_more_experts_are_no_more_launches():
    def launches(count):
        weight, scales = some_codes(count, INPUTS // 8, OUTPUTS), torch.randn(count, 2, OUTPUTS)

        def original(b_q_weight, size_k, size_n, num_bits, is_a_8bit=False):
            return torch.stack([one.reshape(size_k // 16, -1).clone() for one in b_q_weight])

        repacked = loading.integers_at_once(original)
        return counted(
            lambda: (repacked(weight, INPUTS, OUTPUTS, 4), loading.permuted_stack(scales, INPUTS, OUTPUTS, 32))
        )

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
    given = arguments(floats, "perm" in signature(original).parameters, 8, 2048, 768, "cuda")
    assert torch.equal(at_once(floats)(original)(*given), original(*given))


UTILS = "vllm.model_executor.layers.quantization.utils.marlin_utils"


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def scales(kind):
    generator = torch.Generator().manual_seed(0)
    made = torch.rand(24, 192, generator=generator) * 448
    made[3], made[7, :5] = 0.125, 0.0
    made *= {"full": 1.0, "small": 2.0**-9, "zero": 0.0, "largest": 1.0}[kind]
    if kind == "largest":
        made[0, 0] = 448.0
    return made.to(torch.float8_e4m3fn).to(torch.bfloat16)


def theirs(name):
    """vLLM's own function; patched is the module of 4-bit floats alone, of which this takes a fresh one."""
    if not name.startswith("nvfp4"):
        return getattr(importlib.import_module(UTILS), name)
    spec = importlib.util.find_spec(f"{UTILS}_fp4")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


@pytest.mark.vllm
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["full", "largest", "small", "zero"])
def test_scales_become_the_same_bytes(kind, dtype):
    made, factor = loading.processed_scales(scales(kind), dtype)
    expected, number = theirs("nvfp4_marlin_process_scales")(scales(kind), a_dtype=dtype)
    assert torch.equal(bits(made), bits(expected))
    assert made.shape == expected.shape
    assert factor.item() == number
    assert (number > 1) == (kind == "small" and dtype == torch.bfloat16)


@pytest.mark.vllm
@pytest.mark.parametrize("group_size", [16, -1, 32])
def test_permutations_are_the_same(group_size):
    numbers, bias = torch.randn(2, 192), torch.randn(192)
    expected = theirs("marlin_permute_scales")(numbers, 32, 192, group_size)
    assert torch.equal(loading.permuted_scales(numbers, 32, 192, group_size), expected)
    assert torch.equal(loading.permuted_bias(bias), theirs("marlin_permute_bias")(bias))


@pytest.mark.vllm
def test_a_layer_is_handed_to_its_kernel_as_vllm_hands_it():
    for _ in range(2):  # a second engine in the process
        PATCHES["nvfp4_repacking"].make()
    scheme_class = getattr(*find(loading._NVFP4))
    layer, given = nn.Module(), []
    layer.weight_packed = nn.Parameter(torch.arange(8, dtype=torch.uint8).view(2, 4), requires_grad=False)
    layer.weight_global_scale = nn.Parameter(torch.tensor([4.0, 4.0]), requires_grad=False)
    scheme = SimpleNamespace(use_a16=True, kernel=SimpleNamespace(process_weights_after_loading=given.append))
    packed = layer.weight_packed
    scheme_class.process_weights_after_loading(scheme, layer)
    assert given == [layer]
    assert layer.weight is packed
    assert dict(layer.named_parameters()).keys() == {"weight", "weight_global_scale"}
    assert layer.weight_global_scale.item() == 0.25
    utils = importlib.import_module(f"{UTILS}_fp4")
    made, factor = utils.nvfp4_marlin_process_scales(scales("small"), a_dtype=torch.bfloat16)
    assert factor.item() > 1
    shared, number = utils.nvfp4_marlin_process_scales(scales("small"), factor.item(), torch.bfloat16)
    assert number == factor.item()
    assert torch.equal(bits(made), bits(shared))


@pytest.mark.vllm
def test_a_model_is_inspected_in_this_process_as_in_another(monkeypatch):
    from vllm.model_executor.models import registry

    lazy = registry.ModelRegistry.models["Qwen3ForCausalLM"]
    expected = registry._ModelInfo.from_model_cls(lazy.load_model_cls())
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda inspect: pytest.fail("a process was started"))
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    found = loading.inspected_here(None)(lazy)
    assert found == expected
    assert found.architecture == "Qwen3ForCausalLM"
    assert found.is_text_generation_model
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    assert loading.inspected_here(lambda model: "another's")(lazy) == "another's"
