"""Decoder layers that learner and sampler compute alike."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from lit_qrl.errors import ConfigError
from lit_qrl.formats import FP8Row, Int4Group
from lit_qrl.network.padding_free import ATTENTION
from lit_qrl.precision.layers.one_pass import OnePassRMSNorm
from lit_qrl.rollout.engine import SamplerSpec
from lit_qrl.rollout.vllm import patches, same_kernels
from lit_qrl.rollout.vllm.engine import VLLMEngine
from tests.triton_interpreter import run_interpreted


@pytest.fixture(autouse=True)
def inactive(monkeypatch):
    monkeypatch.setattr(same_kernels, "_active", False)


@pytest.mark.vllm
def test_an_engine_is_built_with_the_learners_norm_and_the_next_one_with_vllms():
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.layernorm import RMSNorm

    with set_current_vllm_config(VllmConfig()):
        with same_kernels.built(True):
            mine = RMSNorm(8)
            assert same_kernels.active()
        theirs = RMSNorm(8)
        assert same_kernels.active()  # while that engine lives
        with same_kernels.built(False):
            assert not same_kernels.active()
    assert isinstance(mine, RMSNorm)
    assert type(mine) is not RMSNorm
    assert type(mine).forward_cuda is not RMSNorm.forward_cuda
    assert type(theirs) is RMSNorm


class Plain(torch.nn.Module):
    """As vLLM's class, as far as it is asked."""

    variance_size_override, has_weight, variance_epsilon = None, True, 1e-6

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 128))


def compare_norms(device):
    torch.manual_seed(0)
    norm = same_kernels._norm_of(Plain)()
    x, residual = torch.randn(5, 2, 128, device=device), torch.randn(5, 2, 128, device=device)
    torch.testing.assert_close(norm.forward_cuda(x), F.rms_norm(x, (128,), norm.weight, 1e-6))
    y, total = norm.forward_cuda(x, residual)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(y, F.rms_norm(x + residual, (128,), norm.weight, 1e-6))
    assert norm.forward_cuda(x[3:4], residual[3:4])[0].equal(y[3:4])  # whatever is beside it


def test_the_norm_is_the_formula_and_a_row_does_not_depend_on_others():
    run_interpreted(compare_norms)


@pytest.mark.parametrize(
    ("available", "options", "expected"),
    [
        (False, {}, "compute capability 9.0"),
        (True, {"engine_args": {"attention_backend": "FLASHINFER"}}, "FLASH_ATTN"),
    ],
)
def test_what_computes_otherwise_is_refused(monkeypatch, available, options, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    engine = VLLMEngine(same_kernels=True, **options)
    with pytest.raises(ConfigError, match=expected):
        same_kernels.check(engine._arguments)


class _Config(SimpleNamespace):
    def get_text_config(self):
        return self


def model(config, dtype=torch.bfloat16, fused=True):
    norm = Qwen2RMSNorm(8).to(dtype)
    made = torch.nn.Sequential(OnePassRMSNorm(norm, columns=False, codes=False) if fused else norm)
    made.config = config
    return made


@pytest.mark.parametrize(
    ("asked", "changed", "expected"),
    [
        ("auto", {}, True),
        (False, {}, False),
        (True, {"aligned": False}, True),
        ("auto", {"aligned": False}, False),
        ("auto", {"format": Int4Group()}, False),
        ("auto", {"format": None}, False),
        ("auto", {"model_type": "gemma2"}, False),
        ("auto", {"head_dim": 80}, False),
        ("auto", {"dtype": torch.float32}, False),
        ("auto", {"learner": torch.float32}, False),
        ("auto", {"attention": "sdpa"}, False),
        ("auto", {"fused": False}, False),
        ("auto", {"rope": "yarn"}, False),
        ("auto", {"arguments": {"attention_backend": "FLASHINFER"}}, False),
    ],
)
def test_it_is_chosen_where_an_aligned_format_quantizes_activations(monkeypatch, caplog, asked, changed, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    spec = SamplerSpec(format=changed.get("format", FP8Row()), aligned=changed.get("aligned", True))
    config = _Config(model_type=changed.get("model_type", "qwen2"), head_dim=changed.get("head_dim", 64))
    config._attn_implementation = changed.get("attention", ATTENTION)
    config.rope_parameters = {"rope_type": changed.get("rope", "default")}
    network = model(config, changed.get("learner", torch.bfloat16), changed.get("fused", True))
    dtype = changed.get("dtype", torch.bfloat16)
    assert same_kernels.chosen(asked, spec, network, dtype, changed.get("arguments", {})) is expected
    wanted = asked == "auto" and changed.keys().isdisjoint({"aligned", "format"})
    assert ("their last bits differ" in caplog.text) is (wanted and not expected)
    if expected and wanted:
        assert not same_kernels.chosen(asked, spec, network, dtype, {}, same_kernels.APART)
        assert "a process of its own" in caplog.text


@pytest.mark.parametrize(
    ("options", "apart", "told"),
    [
        ({}, False, "on, on a GPU of compute capability 9.0"),
        ({}, True, "cannot be had, vLLM is in a process of its own"),
        ({"tensor_parallel_size": 2}, False, "cannot be had, each process of tensor_parallel_size"),
        ({"batch_invariant": True}, False, "off, batch_invariant"),
        ({"same_kernels": False}, False, "off, as it is set"),
        ({"engine_args": {"attention_backend": "FLASHINFER"}}, False, "cannot be had, The attention of engine_args"),
    ],
)
def test_it_is_foretold_without_a_gpu(options, apart, told):
    config = _Config(model_type="qwen2", head_dim=64, _attn_implementation=ATTENTION)
    spec = SamplerSpec(format=FP8Row(), aligned=True)
    assert same_kernels.foretold(VLLMEngine(**options), spec, model(config), apart).startswith(told)


def test_another_version_of_vllm_is_said(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    network = model(_Config(model_type="qwen2", head_dim=64, _attn_implementation=ATTENTION))
    for version, said in (((0, 26, 1), False), ((0, 32, 0), True)):
        caplog.clear()
        monkeypatch.setattr(same_kernels, "installed_version", lambda known=(version, False): known)
        assert same_kernels.chosen("auto", SamplerSpec(format=FP8Row(), aligned=True), network, torch.bfloat16, {})
        assert ("this is 0.32.0" in caplog.text) is said


def test_few_rows_are_multiplied_as_many_are(monkeypatch):
    asked = []

    def product(a, b, scale_a, scale_b):
        asked.append(len(a))
        return (a.float() @ b) * scale_a * scale_b

    a, b = torch.randn(3, 128).to(torch.float8_e4m3fn), torch.randn(128, 5)
    scales = torch.rand(3, 1), torch.rand(5)
    multiply = patches.of_many_rows(product)
    expected = multiply(a, b, scale_a=scales[0], scale_b=scales[1])
    monkeypatch.setattr(same_kernels, "_active", True)
    torch.testing.assert_close(multiply(a, b, scale_a=scales[0], scale_b=scales[1]), expected)
    one = torch.rand(1)  # of the whole tensor: there is no row to add
    multiply(a, b, scale_a=one, scale_b=scales[1])
    multiply(a.repeat(30, 1), b, scale_a=scales[0].repeat(30, 1), scale_b=scales[1])
    assert asked == [3, 65, 3, 90]


@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.parametrize("size", [64, 96, 128])
def test_attention_has_the_values_and_gradients_of_torchs(size):
    from lit_qrl.precision.vllm_kernels.exact import flash_attention

    torch.manual_seed(0)
    shape = (3, 70, 8, size), (3, 70, 2, size), (3, 70, 2, size)
    given = [torch.randn(one, device="cuda", dtype=torch.bfloat16, requires_grad=True) for one in shape]
    wide = [one.detach().double().requires_grad_() for one in given]
    out = flash_attention(*given)
    heads = [one.transpose(1, 2) for one in wide]
    expected = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)
    upstream = torch.randn_like(out)
    found = torch.autograd.grad(out, given, upstream)
    wanted = torch.autograd.grad(expected, wide, upstream.double())
    for one, other in zip(found, wanted, strict=True):
        assert F.cosine_similarity(one.double().flatten(), other.flatten(), dim=0) > 0.9999
        assert float(one.double().norm() / other.norm()) == pytest.approx(1, abs=1e-2)
