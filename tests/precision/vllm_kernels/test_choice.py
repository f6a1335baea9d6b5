import logging
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch import nn

from lit_qrl import formats
from lit_qrl.errors import ConfigError
from lit_qrl.formats import MXFP4, NVFP4, FP8Row, Int4Group
from lit_qrl.precision import QATAligned
from lit_qrl.precision.vllm_kernels import choice as kernel_choice
from lit_qrl.precision.vllm_kernels.choice import KernelChoice, choose
from lit_qrl.precision.vllm_kernels.kernels import CutlassFP8Row, SamplerKernel
from tests.precision.toy import Module, Policy, batches, trainer

CPU = torch.device("cpu")


class Fake(SamplerKernel):
    """Multiplies the weight out, twice as large, and counts its packings."""

    name, vllm_name = "machete", "FakeKernel"

    def __init__(self):
        self.packed = 0

    def missing(self, format, shape, dtype):
        return None if shape[1] % 64 == 0 else "it takes in_features in units of 64"

    def prepare(self, q, dtype):
        self.packed += 1
        return q.format.dequantize(q, dtype) * 2

    def multiply(self, x, weight, bias):
        out = x @ weight.t()
        return out if bias is None else out + bias


@pytest.fixture
def fake(monkeypatch):
    kernel = Fake()

    def choose(name, format, shape, dtype, device):
        return kernel.missing(format, shape, dtype) or kernel

    monkeypatch.setattr(kernel_choice, "choose", choose)
    return kernel


def sequential(*widths):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


@pytest.mark.parametrize(
    ("kernel", "format", "fits"),
    [
        ("machete", Int4Group(), True),
        ("marlin", Int4Group(), True),
        ("marlin", NVFP4(), True),
        ("marlin", MXFP4(), True),
        ("machete", NVFP4(), False),
        ("machete", FP8Row(), False),
        ("marlin", Int4Group(activations="fp8"), False),
    ],
)
def test_a_kernel_is_refused_for_a_format_that_it_does_not_multiply(kernel, format, fits):
    if fits:
        assert QATAligned(format, kernel=kernel).choice.kernel == kernel
    else:
        with pytest.raises(ConfigError, match=f"{kernel} does not multiply {format.name}"):
            QATAligned(format, kernel=kernel)


def test_an_unknown_kernel_is_refused():
    with pytest.raises(ConfigError, match="auto, dequantize, marlin, machete"):
        KernelChoice("cublas", Int4Group())


def test_a_kernel_asked_for_by_name_must_run_on_this_host():
    plugin, model = QATAligned("int4_group", kernel="machete"), sequential(128, 64)
    with pytest.raises(ConfigError, match=r"machete cannot multiply 0 \(64, 128\).*on c"):
        plugin.convert_module(model)


def test_without_vllm_as_the_sampler_the_weight_is_multiplied_out(fake):
    model = sequential(128, 64)
    plugin = QATAligned(Int4Group(32))
    plugin.convert_module(model)
    x = torch.randn(3, 128)
    assert torch.equal(model(x), plugin.format.linear(x, plugin.format.quantize(model[0].weight), model[0].bias))
    assert fake.packed == 0


def test_with_vllm_as_the_sampler_its_kernel_multiplies_and_packs_once_per_update(fake):
    model = sequential(128, 64)
    plugin = QATAligned(Int4Group(32))
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
    plugin = QATAligned(Int4Group(32))
    plugin.convert_module(model)
    plugin.choice.sampler = "vllm"
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            model(torch.randn(3, 64))
    assert fake.packed == 1
    said = [record.message for record in caplog.records if record.name.endswith("vllm_kernels.choice")]
    assert len(said) == 2
    assert "0 takes the sampler's kernel FakeKernel" in said[0]
    assert "1 is multiplied out in the learner, unlike in the sampler: it takes in_features in units of 64" in said[1]


def test_the_engine_of_the_run_says_whose_kernels_the_sampler_takes(fake, tmp_path):
    class Data(LightningDataModule):
        engine = SimpleNamespace(kernels="vllm")

        def train_dataloader(self):
            return batches()

    plugin = QATAligned(Int4Group(32))
    trainer(tmp_path, plugin).fit(Module(Policy()), datamodule=Data())
    assert plugin.choice.sampler == "vllm"
    assert fake.packed > 0


def test_nothing_runs_on_a_cpu_whatever_is_installed():
    for name in ("int4_group", "nvfp4"):
        assert "CUDA" in choose("auto", formats.get(name), (128, 128), torch.bfloat16, CPU)


def test_where_bits_must_agree_a_layer_without_the_samplers_kernel_is_refused_by_name(fake):
    choice = KernelChoice("auto", FP8Row())
    choice.sampler, choice.exact = "vllm", True
    assert choice.pick("up", (64, 64), torch.randn(1, 64)) is fake
    with pytest.raises(ConfigError, match=r"down \(64, 65\).*in units of 64.*Given: fp8_row, multiplied out"):
        choice.pick("down", (64, 65), torch.randn(1, 65))


def test_the_fp8_kernel_of_the_sampler_says_what_it_lacks():
    kernel = CutlassFP8Row()
    assert kernel.missing(Int4Group(), (64, 64), torch.bfloat16) == "this kernel multiplies fp8_row weights"
    if not torch.cuda.is_available():
        assert "on cpu" in str(choose("auto", FP8Row(), (64, 64), torch.bfloat16, CPU))


@pytest.mark.parametrize(
    ("capability", "dtype", "shape", "reason"),
    [
        ((8, 9), torch.bfloat16, (64, 64), "9.0"),
        ((9, 0), torch.float32, (64, 64), "bf16"),
        ((9, 0), torch.bfloat16, (64, 72), "16"),
    ],
)
def test_the_fp8_kernel_is_for_some_gpus_dtypes_and_shapes(monkeypatch, capability, dtype, shape, reason):
    monkeypatch.setattr("lit_qrl.precision.vllm_kernels.kernels._capability", lambda: capability)
    assert reason in str(CutlassFP8Row().missing(FP8Row(), shape, dtype))
    monkeypatch.setattr("lit_qrl.precision.vllm_kernels.kernels._capability", lambda: (9, 0))
    assert CutlassFP8Row().missing(FP8Row(), (64, 64), torch.bfloat16) is None
