"""What the adapters hand to vLLM's ops: stand-ins on a CPU undo the documented layouts and multiply."""

import logging
import sys
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch import nn

from lit_qrl.errors import ConfigError
from lit_qrl.formats import FP8Row, Int4Group
from lit_qrl.precision import PackedLoRA, QATAligned
from lit_qrl.precision.vllm_kernels import kernels as sampler_kernels
from lit_qrl.precision.vllm_kernels.kernels import CutlassFP8Row, CutlassW4A8, KernelChoice, SamplerKernel, choose
from tests.precision.toy import Module, Policy, batches, trainer

HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(sampler_kernels.gemm, "capability", lambda index: (9, 0))


W4A8 = Int4Group(activations="fp8")


@pytest.mark.parametrize(
    ("format", "shape", "dtype", "capability", "expected"),
    [
        (W4A8, (128, 256), HALF, (9, 0), CutlassW4A8),
        (Int4Group(64, activations="fp8"), (128, 256), HALF, (9, 0), "for int4_group:group_size=64,activations=fp8, "),
        (Int4Group(activations="int8"), (128, 256), HALF, (9, 0), "but for fp8_row and int4_group:activations=fp8"),
        (W4A8, (128, 256), torch.float16, (9, 0), "takes torch.bfloat16, not torch.float16"),
        (W4A8, (256, 128), HALF, (8, 9), "9.0"),
        (FP8Row(), (64, 64), HALF, (9, 0), CutlassFP8Row),
        (FP8Row(), (64, 64), HALF, (8, 9), "9.0"),
        (FP8Row(), (64, 64), torch.float32, (9, 0), "bfloat16"),
        (FP8Row(), (64, 72), HALF, (9, 0), "units of 16"),
    ],
)
def test_the_kernel_of_a_format_is_found_or_what_it_lacks(format, shape, dtype, capability, expected, monkeypatch):
    monkeypatch.setattr(sampler_kernels.gemm, "capability", lambda index: capability)
    monkeypatch.setattr(sampler_kernels, "installed", lambda: True)
    vllm = ModuleType("vllm")
    vllm.envs = SimpleNamespace(VLLM_DISABLED_KERNELS=[])
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    found = choose(format, shape, dtype, torch.device("cuda"))
    assert expected in found if isinstance(expected, str) else isinstance(found, expected)


def test_rows_of_fp8_are_quantized_once_for_all_layers_that_read_them(monkeypatch):
    made = []

    def scaled_fp8_quant(x, scale, use_per_token_if_dynamic):
        assert use_per_token_if_dynamic
        made.append(x.shape)
        factor = x.abs().amax(dim=1, keepdim=True).float() / 448
        return (x.float() / factor).to(torch.float8_e4m3fn), factor

    def cutlass_scaled_mm(a, b, scale_a, scale_b, out_dtype, bias):
        out = (a.float() * scale_a) @ (b.float() * scale_b.t())
        return (out if bias is None else out + bias.float()).to(out_dtype)

    operators, package = ModuleType("_custom_ops"), ModuleType("vllm")
    operators.scaled_fp8_quant, operators.cutlass_scaled_mm = scaled_fp8_quant, cutlass_scaled_mm
    package._custom_ops = operators
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm._custom_ops", operators)
    torch.manual_seed(0)
    kernel, format, x = CutlassFP8Row(), FP8Row(), torch.randn(2, 3, 64).bfloat16()
    for bias in (None, torch.randn(48).bfloat16()):
        q = format.quantize(torch.randn(48, 64).bfloat16())
        expected = format.apply(x, format.prepare(q, torch.bfloat16), bias)
        torch.testing.assert_close(kernel.apply(x, kernel.prepare(q, torch.bfloat16), bias), expected)
    assert made == [(6, 64)]


LOW = Int4Group(32, activations="int8")


class Fake(SamplerKernel):
    """Multiplies the weight out, twice as large, and counts its packings."""

    vllm_name = "FakeKernel"

    def __init__(self):
        self.packed = 0

    def missing(self, shape, dtype):
        return None if shape[1] % 64 == 0 else "it takes in_features in units of 64"

    def prepare(self, q, dtype):
        self.packed += 1
        return q.format.dequantize(q, dtype) * 2

    def apply(self, x, weight, bias):
        out = x @ weight.t()
        return out if bias is None else out + bias


@pytest.fixture
def fake(monkeypatch):
    kernel = Fake()

    def choose(format, shape, dtype, device):
        return kernel.missing(shape, dtype) or kernel

    monkeypatch.setattr(sampler_kernels, "choose", choose)
    return kernel


def sequential(*widths):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


@pytest.mark.parametrize("plugin", [QATAligned, PackedLoRA])
@pytest.mark.parametrize("kernel", ["machete", "cublas"])
def test_an_unknown_kernel_is_refused(plugin, kernel):
    with pytest.raises(ConfigError, match=f"Expected: auto or dequantize. Given: {kernel}. Set kernel to auto."):
        plugin("int4_group", kernel=kernel)


@pytest.mark.parametrize(("format", "sampler"), [(Int4Group(32), "vllm"), (LOW, "torch")])
def test_weights_alone_and_those_of_another_sampler_are_multiplied_out(format, sampler, fake):
    model, plugin = sequential(128, 64), QATAligned(format)
    plugin.convert_module(model)
    plugin.choice.sampler = sampler
    x = torch.randn(3, 128)
    assert torch.equal(model(x), plugin.format.linear(x, plugin.format.quantize(model[0].weight), model[0].bias))
    assert fake.packed == 0


def test_with_vllm_as_the_sampler_its_kernel_multiplies_and_packs_once_per_update(fake):
    model = sequential(128, 64)
    plugin = QATAligned(LOW)
    plugin.convert_module(model)
    plugin.choice.sampler = "vllm"
    layer = model[0]
    x = torch.randn(2, 3, 128, requires_grad=True)
    for _ in range(2):
        out = model(x)
    weight = layer.quantized().format.dequantize(layer.quantized())
    assert torch.allclose(out, x @ (2 * weight).t() + layer.bias, rtol=1e-5, atol=1e-5)
    out.sum().backward()
    assert torch.allclose(x.grad, torch.ones(2, 3, 64) @ weight)  # of what the format holds, not of the kernel
    assert fake.packed == 1
    with torch.no_grad():
        layer.weight.mul_(2.0)
    model(x)
    assert fake.packed == 2
    assert torch.float32 not in layer._prepared  # no weight was multiplied out


def test_a_layer_that_the_kernel_does_not_take_falls_back_and_says_so(fake, caplog):
    model = sequential(64, 96, 64)
    plugin = QATAligned(LOW)
    plugin.convert_module(model)
    plugin.choice.sampler = "vllm"
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            model(torch.randn(3, 64))
    assert fake.packed == 1
    said = [record.message for record in caplog.records if record.name.endswith("vllm_kernels.kernels")]
    assert len(said) == 2
    assert "0 takes the sampler's kernel FakeKernel" in said[0]
    assert "1 is multiplied out in the learner, unlike in the sampler: it takes in_features in units of 64" in said[1]


def test_the_engine_of_the_run_says_whose_kernels_the_sampler_takes(fake, tmp_path):
    class Data(LightningDataModule):
        engine = SimpleNamespace(kernels="vllm")

        def train_dataloader(self):
            return batches()

    plugin = QATAligned(LOW)
    trainer(tmp_path, plugin).fit(Module(Policy()), datamodule=Data())
    assert plugin.choice.sampler == "vllm"
    assert fake.packed > 0


def test_nothing_runs_on_a_cpu_whatever_is_installed():
    assert "on cpu" in choose(FP8Row(), (128, 128), torch.bfloat16, torch.device("cpu"))


def test_where_bits_must_agree_a_layer_without_the_samplers_kernel_is_refused_by_name(fake):
    choice = KernelChoice("auto", FP8Row())
    choice.sampler, choice.exact = "vllm", True
    assert choice.pick("up", (64, 64), torch.randn(1, 64)) is fake
    with pytest.raises(ConfigError, match=r"down \(64, 65\).*in units of 64.*Given: fp8_row, multiplied out"):
        choice.pick("down", (64, 65), torch.randn(1, 65))
