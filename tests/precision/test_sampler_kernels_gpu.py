import copy

import pytest
import torch
from torch import nn

from lit_qrl.formats import FP8Row, Int4Group
from lit_qrl.precision import QATAligned
from lit_qrl.precision.vllm_kernels.kernels import CutlassW4A8, choose

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]

DEVICE = torch.device("cuda")


def layer(format, shape=(768, 1024)):
    torch.manual_seed(0)
    q = format.quantize(torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) * 0.02)
    return q, torch.randn(shape[0], device=DEVICE, dtype=torch.bfloat16)


def relative(made, expected):
    return float((made.float() - expected.float()).norm() / expected.float().norm())


def test_w4a8_rounds_the_scales_to_fp8_as_well():
    format = Int4Group(128, activations="fp8")
    q, _ = layer(format)
    kernel = CutlassW4A8()
    assert isinstance(choose(format, q.shape, torch.bfloat16, DEVICE), CutlassW4A8)
    x = torch.randn(64, 1024, device=DEVICE, dtype=torch.bfloat16)
    made = kernel.apply(x, kernel.prepare(q, torch.bfloat16), None)
    eight = torch.float8_e4m3fn
    channel = q.scales.float().amax(dim=1, keepdim=True) / 448.0
    scales = ((q.scales.float() / channel).to(eight).float() / 8).to(eight).float().repeat_interleave(128, dim=1)
    codes = format.dequantize(q) / q.scales.float().repeat_interleave(128, dim=1)
    # the kernel looks the products of code and scale up in a table, in E4M3
    weight = (codes.round() * scales).to(eight).float() * channel * 8
    row = x.float().abs().amax(dim=1, keepdim=True) / 448.0
    rounded = (x.float() / row).to(torch.float8_e4m3fn).float() * row
    assert relative(made, rounded @ weight.t()) < 0.01
    emulated = format.linear(x, q)
    assert relative(made, emulated) < 0.05


def test_an_aligned_layer_takes_the_kernel_and_learns_as_before():
    torch.manual_seed(0)
    layers = []
    for kernel in ("dequantize", "auto"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(512, 768, device=DEVICE, dtype=torch.bfloat16), nn.SiLU())
        plugin = QATAligned("fp8_row", kernel=kernel)
        plugin.convert_module(model)
        plugin.choice.sampler = "vllm"
        x = torch.randn(4, 64, 512, device=DEVICE, dtype=torch.bfloat16)
        out = model(x)
        out.float().pow(2).mean().backward()
        layers.append((copy.copy(out.detach()), model[0].weight.grad, model[0]))
    assert relative(layers[1][0], layers[0][0]) < 2.0**-7
    assert relative(layers[1][1], layers[0][1]) < 2.0**-5
    assert all(isinstance(key, tuple) for key in layers[1][2]._prepared)  # of the kernel alone


def test_vllm_s_own_choice_is_taken_on_this_device(monkeypatch):
    found = choose(FP8Row(), (512, 512), torch.bfloat16, DEVICE)
    if torch.cuda.get_device_capability() != (9, 0):
        assert "9.0" in str(found)
        return
    assert found.vllm_name == "CutlassFP8ScaledMMLinearKernel"
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "CutlassFP8ScaledMMLinearKernel")
    assert "VLLM_DISABLED_KERNELS" in str(choose(FP8Row(), (512, 512), torch.bfloat16, DEVICE))
