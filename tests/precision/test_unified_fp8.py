import pytest
import torch
from torch import nn

from lit_qrl.errors import ConfigError
from lit_qrl.formats import FP8Block
from lit_qrl.formats.kernels import gemm
from lit_qrl.precision.base import device_of
from lit_qrl.precision.layers import block_fp8
from lit_qrl.precision.layers.low_bit import LowBitLinear
from lit_qrl.precision.unified_fp8 import Unified, UnifiedFP8
from tests.formats.oracle import rounded_blocks, rounded_groups
from tests.precision.toy import Module, Policy, configured, trainer


def unified(linear):
    arithmetic = Unified(FP8Block())
    arithmetic.take(block_fp8.backend("emulate"))
    return LowBitLinear.from_linear(linear, "layer", arithmetic)


def plugin(**options):
    return UnifiedFP8(backend="emulate", **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [3, 130, 256])
def test_the_three_gemms_against_loops_in_fp64(tokens, dtype):
    torch.manual_seed(0)
    linear = nn.Linear(200, 264).to(dtype)
    layer = unified(linear)
    x = (torch.randn(tokens, 200) * torch.rand(tokens, 1) * 4).to(dtype).requires_grad_()
    grad = (torch.randn(tokens, 264) * torch.rand(1, 264)).to(dtype)
    out = layer(x)
    out.backward(grad)
    weight = rounded_blocks(linear.weight.detach())
    eps = torch.finfo(dtype).eps
    for ours, a, b, added in [
        (out, rounded_groups(x.detach()), weight, linear.bias.detach().double()),
        (x.grad, rounded_groups(grad), weight.t(), 0.0),
        (layer.weight.grad, rounded_groups(grad.t()), rounded_groups(x.detach().t()), 0.0),
    ]:
        exact = a @ b.t() + added
        slack = (a.abs() @ b.abs().t()) * 2.0**-20
        assert ours.dtype == dtype
        assert bool(((ours.double() - exact).abs() <= exact.abs() * eps + slack).all())
    assert torch.allclose(layer.bias.grad, grad.sum(dim=0))


def test_the_input_is_kept_in_eight_bits():
    layer = unified(nn.Linear(256, 128, bias=False))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(torch.randn(128, 256, requires_grad=True))
    assert sorted(t.dtype.itemsize for t in saved) == [1, 4]
    assert sum(t.numel() * t.dtype.itemsize for t in saved) == 128 * 256 + 256 * 4


def test_a_frozen_weight_keeps_no_input():
    layer = unified(nn.Linear(256, 128, bias=False))
    layer.weight.requires_grad_(False)
    saved = []
    x = torch.randn(4, 256, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = layer(x)
    out.sum().backward()
    assert x.grad is not None


def test_shapes_that_the_gemm_cannot_take_are_named(monkeypatch):
    module = configured()
    unify = plugin()
    monkeypatch.setattr(block_fp8, "backend", lambda *_: type("Fast", (block_fp8.Emulated,), {"name": "torch"})())
    with pytest.raises(ConfigError, match=r"14 layers do not fit.*q_proj \(64, 64\).*divisible by 128.*emulate"):
        unify.convert_module(module)


def test_auto_chooses_for_the_trainer_s_device_and_not_for_the_host_s(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(gemm, "fp8_block_gemm", lambda device, shape: device.type == "cuda")
    monkeypatch.setattr(block_fp8, "_te_missing", lambda: "no Transformer Engine")
    assert block_fp8.backend("auto").name == "torch"
    plugins = [UnifiedFP8(), UnifiedFP8("torch")]
    module, on_cpu = Module(Policy()), trainer(tmp_path, None)
    module.policy.configure()
    module.trainer = on_cpu
    assert device_of(module) == torch.device("cpu")
    plugins[0].convert_module(module)
    assert plugins[0].backend.name == "emulate"
    with pytest.raises(ConfigError, match=r"backend torch cannot run here: the learner is on the device cpu.*emulate"):
        plugins[1].convert_module(module)
