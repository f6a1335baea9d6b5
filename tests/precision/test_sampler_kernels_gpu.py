"""On a CUDA device with vLLM: its kernels in the learner, against the weight multiplied out."""

import copy

import pytest
import torch
from torch import nn

from lit_qrl import formats
from lit_qrl.formats import MXFP4, NVFP4, Int4Group
from lit_qrl.precision import QATAligned
from lit_qrl.precision.vllm_kernels.choice import choose
from lit_qrl.precision.vllm_kernels.kernels import CutlassW4A8, Machete, MarlinFP4, MarlinInt4

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]

DEVICE = torch.device("cuda")
PAIRS = [
    (Machete, Int4Group(128)),
    (Machete, Int4Group(64)),
    (MarlinInt4, Int4Group(128)),
    (MarlinInt4, Int4Group(32)),
    (MarlinFP4, NVFP4()),
    (MarlinFP4, MXFP4()),
]


def layer(format, shape=(768, 1024)):
    torch.manual_seed(0)
    q = format.quantize(torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) * 0.02)
    return q, torch.randn(shape[0], device=DEVICE, dtype=torch.bfloat16)


def relative(made, expected):
    return float((made.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("rows", [1, 17, 300])
@pytest.mark.parametrize(("kernel", "format"), PAIRS, ids=str)
def test_a_kernel_multiplies_the_weight_that_the_codes_stand_for(kernel, format, rows):
    q, bias = layer(format)
    made = kernel()
    assert made.missing(format, q.shape, torch.bfloat16) is None
    x = torch.randn(2, rows, 1024, device=DEVICE, dtype=torch.bfloat16)
    weight = made.prepare(q, torch.bfloat16)
    product = x.float() @ format.dequantize(q, torch.bfloat16).float().t()
    out = made.apply(x, weight, None)
    assert out.dtype == torch.bfloat16
    assert out.shape == product.shape
    # rounding to bf16 is 2^-9 of an output at most; each column by itself, so that none is misplaced
    columns = (out.float() - product).flatten(0, 1).norm(dim=0) / product.flatten(0, 1).norm(dim=0)
    assert float(columns.max()) < 2.0**-7.5
    assert relative(made.apply(x, weight, bias), product + bias.float()) < 2.0**-8


def test_w4a8_rounds_the_scales_to_fp8_as_well():
    format = Int4Group(128, activations="fp8")
    q, _ = layer(format)
    kernel = CutlassW4A8()
    assert kernel.missing(format, q.shape, torch.bfloat16) is None
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


@pytest.mark.parametrize(("name", "format"), [("auto", "int4_group"), ("marlin", "int4_group"), ("marlin", "nvfp4")])
def test_an_aligned_layer_takes_the_kernel_and_learns_as_before(name, format):
    torch.manual_seed(0)
    layers = []
    for kernel in ("dequantize", name):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(512, 768, device=DEVICE, dtype=torch.bfloat16), nn.SiLU())
        plugin = QATAligned(formats.get(format), kernel=kernel)
        plugin.convert_module(model)
        plugin.choice.sampler = "vllm"
        x = torch.randn(4, 64, 512, device=DEVICE, dtype=torch.bfloat16)
        out = model(x)
        out.float().pow(2).mean().backward()
        layers.append((copy.copy(out.detach()), model[0].weight.grad, model[0]))
    assert relative(layers[1][0], layers[0][0]) < 2.0**-7
    assert relative(layers[1][1], layers[0][1]) < 2.0**-5
    prepared = layers[1][2]._prepared
    assert all(key[0] != torch.bfloat16 for key in prepared if isinstance(key, tuple))
    assert torch.bfloat16 not in prepared  # no weight is multiplied out
    with torch.no_grad():
        layers[1][2].weight.mul_(2.0)
    layers[1][2](torch.randn(4, 512, device=DEVICE, dtype=torch.bfloat16))
    assert len(prepared) == 1  # packed anew


def test_vllm_s_own_choice_is_taken_on_this_device(monkeypatch):
    capability = torch.cuda.get_device_capability()
    found = choose("auto", Int4Group(), (512, 512), torch.bfloat16, DEVICE)
    assert found.vllm_name == ("MacheteLinearKernel" if capability == (9, 0) else "MarlinLinearKernel")
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "MacheteLinearKernel")
    assert choose("auto", Int4Group(), (512, 512), torch.bfloat16, DEVICE).vllm_name == "MarlinLinearKernel"
    assert "groups" in choose("machete", Int4Group(32), (512, 512), torch.bfloat16, DEVICE)
