"""Decoder layers that learner and sampler compute alike."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import GPT2Config, LlamaConfig, Qwen3Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from lit_qrl.errors import ConfigError
from lit_qrl.formats import FP8Block, FP8Row, Int4Group, Int8Channel, MultipliedOut
from lit_qrl.network import invariant
from lit_qrl.network.adapters import merged_tensors
from lit_qrl.network.padding_free import ATTENTION
from lit_qrl.network.structure import outline
from lit_qrl.precision.layers.lora_linear import sum_factors, swap_lora_linears
from lit_qrl.precision.layers.one_pass import OnePassRMSNorm
from lit_qrl.precision.vllm_kernels import exact
from lit_qrl.rollout.adapter import scaling
from lit_qrl.rollout.engine import SamplerSpec
from lit_qrl.rollout.vllm import patches, same_kernels
from lit_qrl.rollout.vllm.engine import VLLMEngine
from tests.triton_interpreter import everywhere

FLASHINFER = {"engine_args": {"attention_backend": "FLASHINFER"}}


@pytest.fixture(autouse=True)
def inactive(monkeypatch):
    monkeypatch.setattr(same_kernels, "_active", False)
    monkeypatch.setattr(same_kernels, "_exact", False)


@pytest.fixture
def hopper(monkeypatch):
    """A host with the GPU and the vLLM whose kernels were compared."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(same_kernels, "installed_version", lambda: ((0, 26, 0), False))
    return monkeypatch


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


@everywhere
def test_the_norm_is_the_formula_and_a_row_does_not_depend_on_others(device):
    torch.manual_seed(0)
    norm = same_kernels._norm_of(Plain)().to(device)
    x, residual = torch.randn(5, 2, 128, device=device), torch.randn(5, 2, 128, device=device)
    torch.testing.assert_close(norm.forward_cuda(x), F.rms_norm(x, (128,), norm.weight, 1e-6))
    y, total = norm.forward_cuda(x, residual)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(y, F.rms_norm(x + residual, (128,), norm.weight, 1e-6))
    assert norm.forward_cuda(x[3:4], residual[3:4])[0].equal(y[3:4])  # whatever is beside it


@pytest.mark.parametrize(
    ("available", "options", "expected"),
    [(False, {}, "compute capability 9.0"), (True, FLASHINFER, "attention_backend left out")],
)
def test_what_computes_otherwise_is_refused(hopper, available, options, expected):
    hopper.setattr(torch.cuda, "is_available", lambda: available)
    engine = VLLMEngine(same_kernels=True, **options)
    with pytest.raises(ConfigError, match=expected):
        same_kernels.check(engine._arguments)


def exactly(format=None, rank=0, **options):
    engine = VLLMEngine(batch_invariant=True, **options)
    same_kernels.check_exact(format, engine._arguments, rank, engine.max_lora_rank)


def test_the_exact_mode_is_had_with_the_formats_whose_products_it_has(hopper):
    exactly()
    exactly(FP8Row())
    exactly(FP8Block())
    exactly(MultipliedOut(Int4Group()))
    exactly(rank=8, max_lora_rank=8)
    exactly(engine_args={"attention_backend": "FLASH_ATTN"})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"capability": (8, 0)}, r"compute capability 9\.0.*Given: \(8, 0\)"),
        ({"capability": (10, 0)}, r"compute capability 9\.0.*Given: \(10, 0\)"),
        ({"version": (0, 32, 0)}, r"vLLM 0\.26.*Given: 0\.32\.0"),
        ({"format": Int4Group(activations="fp8")}, "int4_group on a GPU was not seen.*Given: int4_group"),
        ({"format": Int8Channel()}, "int8_channel on a GPU was not seen.*Given: int8_channel"),
        ({"max_lora_rank": 8}, "max_lora_rank: 0, one of 0, 8, 16.*Given: 8"),
        ({"rank": 20, "max_lora_rank": 32}, "max_lora_rank: 20, one of 0, 8, 16.*Given: 32"),
        (FLASHINFER, "attention_backend left out.*Given: .*FLASHINFER"),
        ({"engine_args": {"compilation_config": {"mode": 3}}}, "compilation_config left out"),
    ],
)
def test_what_is_not_exact_is_refused_by_name(hopper, options, said):
    options = dict(options)
    capability, version = options.pop("capability", (9, 0)), options.pop("version", (0, 26, 0))
    hopper.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    hopper.setattr(same_kernels, "installed_version", lambda: (version, False))
    with pytest.raises(ConfigError, match=said):
        exactly(**options)


def test_models_and_learners_that_compute_otherwise_are_refused():
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 64, "intermediate_size": 64}
    same_kernels.check_decoder(outline(Qwen3Config(**sizes, head_dim=128)))
    same_kernels.check_decoder(outline(LlamaConfig(**sizes, head_dim=64)))
    for config, given in (
        (Qwen3Config(**sizes, head_dim=16), "heads of 16 dimensions"),
        (Qwen3Config(**sizes, head_dim=64), "norms over 64 dimensions"),
        (GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=64), "model_type gpt2"),
    ):
        with pytest.raises(ConfigError, match=rf"llama, qwen2, qwen3.*96, 128, 256 dimensions.*Given: {given}"):
            same_kernels.check_decoder(outline(config))
    config = qwen2()
    same_kernels.check_learner(model(config), torch.bfloat16)
    for other, dtype, expected in (
        (model(config, torch.float32), torch.bfloat16, "both bf16.*Given: float32 and bfloat16"),
        (model(config, fused=False), torch.bfloat16, "model.policy.fuse: auto"),
        (model(qwen2("sdpa")), torch.bfloat16, "packing"),
    ):
        with pytest.raises(ConfigError, match=expected):
            same_kernels.check_learner(other, dtype)
    half = model(config, torch.float16)
    same_kernels.check_learner(half, torch.float16)
    with pytest.raises(ConfigError, match=r"both bf16.*Given: float16 and float16"):
        same_kernels.check_learner(half, torch.float16, exact=True)


def test_plain_products_of_the_exact_mode_are_the_learners_and_of_others_vllms(monkeypatch):
    monkeypatch.setattr(exact, "product", lambda x, weight, bias: x @ weight.t() + bias)
    apply = patches.in_one_order(lambda self, layer, x, bias: "theirs")
    layer = torch.nn.Linear(3, 2)
    assert apply(None, layer, torch.ones(1, 3), layer.bias) == "theirs"
    monkeypatch.setattr(same_kernels, "_exact", True)
    assert apply(None, layer, torch.ones(1, 3), layer.bias).equal(layer(torch.ones(1, 3)))


PARTS = {"q_proj": 96, "k_proj": 64, "v_proj": 64}


def adapted(variant=False):
    """A learner's layers under an adapter, as a policy in bf16 has them: the factors stay in fp32."""
    torch.manual_seed(0)
    config = LoraConfig(r=8, lora_alpha=12, target_modules=list(PARTS), init_lora_weights=False, use_dora=variant)
    layers = torch.nn.ModuleDict({name: torch.nn.Linear(128, size) for name, size in PARTS.items()}).bfloat16()
    network = get_peft_model(layers, config).base_model.model
    swap_lora_linears(network)
    return network, config


@pytest.mark.parametrize("apart", [True, False])
def test_an_adapters_layer_has_the_engines_bits_whatever_is_beside_a_row(monkeypatch, apart):
    monkeypatch.setattr(exact, "product", invariant._tiled)  # which adds in one order, too
    monkeypatch.setattr(same_kernels, "_exact", True)
    network, config = adapted()
    layers = [network[name] for name in PARTS]
    x, upstream = torch.randn(2, 35, 128).bfloat16(), torch.randn(2, 35, sum(PARTS.values())).bfloat16()
    factors = [one for layer in layers for one in (layer.lora_A["default"].weight, layer.lora_B["default"].weight)]

    def learned():
        out = torch.cat([layer(x) for layer in layers], dim=-1)
        return out.detach(), torch.autograd.grad(out, factors, upstream)

    sum_factors(network, merged=not apart)
    with invariant.batch_invariant(True, exact.product):
        found, gradients = learned()
    weights = [layer.base_layer.weight if apart else merged_tensors(layer)["weight"] for layer in layers]
    rows = x.flatten(0, 1)
    held = [[one.detach()[None, None].bfloat16() for one in factors[half::2]] for half in (0, 1)]
    for one in held[1]:
        one.mul_(scaling(config, "q_proj", 8))  # as the engine's buffers have them
    add = patches.term_in_one_order(lambda *_, **__: pytest.fail("vLLM's own"))
    for start in range(0, len(rows), 7):  # as many tokens as an engine may decode at a time
        some = rows[start : start + 7]
        with torch.inference_mode():
            pairs = zip(weights, layers, strict=True)
            drawn = torch.cat([exact.product(some, w, layer.base_layer.bias) for w, layer in pairs], dim=-1)
            if apart:
                add(None, drawn, some, *held, 1.0, tuple(PARTS.values()))
        assert drawn.equal(found.flatten(0, 1)[start : start + 7])
    sum_factors(network, merged=False)
    expected, wanted = learned()
    assert not found.equal(expected)
    torch.testing.assert_close(found, expected, atol=3e-2, rtol=3e-2)
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=0.3, rtol=2e-2)


def test_the_term_of_an_engine_that_is_not_exact_is_vllms():
    asked = []
    patches.term_in_one_order(lambda *args, **named: asked.append((args, named)))(1, 2, 3, 4, 5, 6.0, (7,), buffer=None)
    assert asked == [((1, 2, 3, 4, 5, 6.0, (7,)), {"buffer": None})]


def test_an_adapter_that_peft_computes_is_refused():
    for variant in (False, True):
        learner = model(qwen2())
        learner.append(adapted(variant)[0])
        same_kernels.check_learner(learner, torch.bfloat16)
        if variant:
            with pytest.raises(ConfigError, match=r"plain LoRA on linear layers.*Given: an adapter that PEFT computes"):
                same_kernels.check_learner(learner, torch.bfloat16, exact=True)
        else:
            same_kernels.check_learner(learner, torch.bfloat16, exact=True)


class _Config(SimpleNamespace):
    def get_text_config(self):
        return self


def qwen2(attention=ATTENTION):
    return _Config(model_type="qwen2", head_dim=64, _attn_implementation=attention)


def model(config, dtype=torch.bfloat16, fused=True):
    norm = Qwen2RMSNorm(8).to(dtype)
    made = torch.nn.Sequential(OnePassRMSNorm(norm, columns=False, codes="") if fused else norm)
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
@pytest.mark.usefixtures("hopper")
def test_it_is_chosen_where_an_aligned_format_quantizes_activations(caplog, asked, changed, expected):
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
        ({"batch_invariant": True}, False, "on, as batch_invariant asks"),
        ({"same_kernels": False}, False, "off, as it is set"),
        (FLASHINFER, False, "cannot be had, An argument of data.engine.engine_args"),
    ],
)
def test_it_is_foretold_without_a_gpu(options, apart, told):
    spec = SamplerSpec(format=FP8Row(), aligned=True)
    assert same_kernels.foretold(VLLMEngine(**options), spec, model(qwen2()), apart).startswith(told)


def test_another_version_of_vllm_is_said(hopper, caplog):
    network = model(qwen2())
    for version, said in (((0, 26, 1), False), ((0, 32, 0), True)):
        caplog.clear()
        hopper.setattr(same_kernels, "installed_version", lambda known=(version, False): known)
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
