"""Repacking that runs ahead of the device makes the very bytes that vLLM's own repacking makes."""

import importlib
import importlib.util
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lit_qrl.rollout.vllm.patches import nvfp4_repacking

pytestmark = pytest.mark.vllm

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["full", "largest", "small", "zero"])
def test_scales_become_the_same_bytes(kind, dtype):
    made, factor = nvfp4_repacking.processed_scales(scales(kind), dtype)
    expected, number = theirs("nvfp4_marlin_process_scales")(scales(kind), a_dtype=dtype)
    assert torch.equal(bits(made), bits(expected))
    assert made.shape == expected.shape
    assert factor.item() == number
    assert (number > 1) == (kind == "small" and dtype == torch.bfloat16)


@pytest.mark.parametrize("group_size", [16, -1, 32])
def test_permutations_are_the_same(group_size):
    numbers, bias = torch.randn(2, 192), torch.randn(192)
    expected = theirs("marlin_permute_scales")(numbers, 32, 192, group_size)
    assert torch.equal(nvfp4_repacking.permuted_scales(numbers, 32, 192, group_size), expected)
    assert torch.equal(nvfp4_repacking.permuted_bias(bias), theirs("marlin_permute_bias")(bias))


def test_a_layer_is_handed_to_its_kernel_as_vllm_hands_it():
    for _ in range(2):  # a second engine in the process
        nvfp4_repacking.PATCH.apply((0, 32, 0))
    scheme_class = importlib.import_module(nvfp4_repacking._SCHEME).CompressedTensorsW4A4Fp4
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
    utils = importlib.import_module(nvfp4_repacking._UTILS)
    made, factor = utils.nvfp4_marlin_process_scales(scales("small"), a_dtype=torch.bfloat16)
    assert factor.item() > 1
    shared, number = utils.nvfp4_marlin_process_scales(scales("small"), factor.item(), torch.bfloat16)
    assert number == factor.item()
    assert torch.equal(bits(made), bits(shared))
