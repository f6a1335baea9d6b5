import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lit_qrl import formats
from lit_qrl.errors import ConfigError
from lit_qrl.network.stream import weight_stream
from lit_qrl.precision.layers.low_bit import LowBitLinear
from lit_qrl.precision.qat import Aligned, QATAligned
from tests.formats.oracle import rounded
from tests.formats.test_mxfp8 import of_the_matrix
from tests.precision.toy import HIDDEN, LINEARS, configured, fit

INT4 = "int4_group:group_size=32"
FORMATS = ("fp8_tensor", "fp8_row", "fp8_block", "int8_channel", INT4, "nvfp4", "mxfp4", "mxfp8", "nf4")


def aligned(linear, format, **options):
    return LowBitLinear.from_linear(linear, "layer", Aligned(format, **options))


def fake_quantized(tensor, numbers):
    """`numbers` in the forward pass, the identity backward: the straight-through estimator, of autograd."""
    return tensor + (numbers - tensor).detach()


LOOPS = {"fp8_row": "token", "fp8_block": "group", "int8_channel": "int8", "fp8": "token"}


def rounded_input(format, x):
    """The activations that a format multiplies, by the loops of the formats' own tests."""
    rows, kind = x.flatten(0, 1), LOOPS.get(format.name, getattr(format, "activations", None))
    made = of_the_matrix(rows)[1] if format.name == "mxfp8" else rounded(rows, LOOPS.get(kind, kind))
    return made.view(x.shape)


def cosine(one, other):
    return float(torch.cosine_similarity(one.detach().double().flatten(), other.detach().double().flatten(), dim=0))


MORE = ("fp8_tensor:activations=token", f"{INT4},activations=fp8", f"{INT4},activations=int8", "bf16")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*FORMATS, *MORE])
def test_gradients_are_those_of_the_quantized_product(name, dtype):
    """Against autograd through F.linear(Q(x), Q(W)) in fp64, with an estimator that passes over the rounding alone."""
    torch.manual_seed(0)
    # 160 inputs: a whole 1×128 and a part of one
    format, plain = formats.get(name), nn.Linear(160, 32).to(dtype)
    x, upstream = torch.randn(2, 9, 160).to(dtype), torch.randn(2, 9, 32).to(dtype)

    weight = format.dequantize(format.quantize(plain.weight)).double()
    parts = [tensor.detach().double().requires_grad_() for tensor in (x, plain.weight, plain.bias)]
    operands = (fake_quantized(parts[0], rounded_input(format, x)), fake_quantized(parts[1], weight))
    out = nn.functional.linear(*operands, parts[2])
    out.backward(upstream.double())
    expected = [part.grad for part in parts]

    found = {}
    for backward in ("dequantized", "high_precision"):
        layer, own = aligned(copy.deepcopy(plain), format, backward=backward), x.clone().requires_grad_()
        result = layer(own)
        assert torch.equal(result, format.linear(x, format.quantize(plain.weight), plain.bias))
        assert cosine(result, out) > 0.9999
        result.backward(upstream)
        grads = (own.grad, layer.weight.grad, layer.bias.grad)
        assert [grad.dtype for grad in grads] == [dtype] * 3
        found[backward] = [cosine(ours, theirs) for ours, theirs in zip(grads, expected, strict=True)]
    assert min(found["dequantized"]) >= 0.9999
    scale = expected[0].norm() / own.grad.double().norm()
    assert 0.9 < float(scale) < 1.1
    if format.name in ("int4_group", "nvfp4", "mxfp4", "nf4"):  # what the option is for
        assert found["high_precision"][0] < 0.998
    own = x.clone().requires_grad_()
    plain(own).backward(upstream)  # whose gradients those in high precision are
    for ours, theirs in zip(grads, (own.grad, plain.weight.grad, plain.bias.grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


def test_the_backward_pass_sees_the_weight_that_the_forward_pass_saw():
    layer, x = aligned(nn.Linear(64, 32), formats.get("fp8_row")), torch.randn(3, 64, requires_grad=True)
    first = layer(x).sum()
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.backward()


def test_nothing_more_is_saved_than_the_input_and_the_weight():
    """What either backward pass keeps between the passes: the layer's own input and the master weight, by address."""
    saved = []
    for backward in ("dequantized", "high_precision"):
        layer = aligned(nn.Linear(64, 32), formats.get(f"{INT4},activations=fp8"), backward=backward)
        x = torch.randn(3, 64, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.data_ptr()), lambda _: None):
            layer(x)
        assert saved[-2:] == [x.data_ptr(), layer.weight.data_ptr()]
    assert len(saved) == 4


@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_row", "fp8_block"])
def test_codes_are_kept_in_place_of_inputs_where_the_device_multiplies_them(name, monkeypatch):
    plain, x, upstream = nn.Linear(256, 32).bfloat16(), torch.randn(3, 4, 256).bfloat16(), torch.randn(3, 4, 32)
    grads, saved = [], []
    for kept in (False, True):
        if kept:  # what a GPU does, by the plain quantizers
            monkeypatch.setattr(type(formats.get(name)), "kept_input", lambda format, x: format.input_codes(x))
        layer, own = aligned(copy.deepcopy(plain), formats.get(name)), x.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one.dtype) or one, lambda one: one):
            out = layer(own)
        out.backward(upstream.bfloat16())
        grads.append([own.grad, layer.weight.grad, layer.bias.grad])
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))
    assert saved == [torch.bfloat16] * 2 + [torch.float8_e4m3fn, torch.float32, torch.bfloat16]


def test_the_codes_of_the_samplers_own_kernel_are_the_ones_that_are_kept():
    format = formats.get("fp8_row")
    layer, x = aligned(nn.Linear(256, 32, bias=False), format), torch.randn(3, 256)
    codes, scale = format.input_codes(x)

    class Kernel:
        vllm_name = "kernel"

        def prepare(self, q, dtype):
            return format.dequantize(q, dtype)

        def apply(self, x, weight, bias):
            return x @ weight.t()

        def kept_input(self, x):
            return codes, 2 * scale

    layer.arithmetic.choice = SimpleNamespace(pick=lambda *_: Kernel())
    layer(x).sum().backward()
    expected = (2 * scale * codes.float()).sum(0)
    torch.testing.assert_close(layer.weight.grad, expected.expand(32, 256))


def test_a_format_that_quantizes_activations_says_how():
    class Half(formats.Int4Group):
        dequantized_input = formats.NumberFormat.dequantized_input

    layer = aligned(nn.Linear(64, 32), Half(group_size=32, activations="fp8"))
    with pytest.raises(NotImplementedError, match=r"Half quantizes activations"):
        layer(torch.randn(3, 64)).sum().backward()


def test_only_what_needs_a_gradient_gets_one():
    layer = aligned(nn.Linear(64, 32, bias=False), formats.get("fp8_row"))
    layer.weight.requires_grad_(False)
    x = torch.randn(3, 64, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is None
    layer.weight.requires_grad_(True)
    layer(x.detach()).sum().backward()
    assert layer.weight.grad.shape == (32, 64)


def test_a_perturbed_weight_is_quantized_anew_and_a_perturbed_norm_passes():
    qat = QATAligned("fp8_tensor")
    module = configured(qat)
    target, norm = "model.layers.0.self_attn.k_proj.weight", "model.norm.weight"

    def perturbed(name, tensor):
        return tensor * 8 if name in (target, norm) else tensor

    changed = ((name, perturbed(name, tensor)) for name, tensor in module.policy.named_weights())
    expected = dict(weight_stream(changed, qat.format, LINEARS))
    published = dict(qat.source(module.policy, qat.format).whole(perturbed, None))
    assert list(published) == list(expected)
    assert all(torch.equal(published[k].view(torch.uint8), expected[k].view(torch.uint8)) for k in expected)


def test_autocast_runs_in_bf16_over_fp32_masters(tmp_path):
    qat = QATAligned(formats.get("fp8_row"), autocast="bf16")
    module, _ = fit(tmp_path, qat)
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    layer = next(iter(qat.layers(module).values()))
    with qat.forward_context():
        out = layer(torch.randn(2, HIDDEN))
    assert out.dtype == torch.bfloat16
    assert layer.quantized().scales.dtype == torch.float32


def test_compiled_equals_eager():
    layer = aligned(nn.Linear(64, 32), formats.get("fp8_row"))
    compiled = torch.compile(layer, backend="eager")
    x = torch.randn(4, 64, requires_grad=True)
    assert torch.equal(compiled(x), layer(x))
    compiled(x).sum().backward()
    assert layer.weight.grad is not None


def test_names_and_options_are_checked():
    made = QATAligned("int4_group", activations="fp8", backward="high_precision")
    assert made.format == formats.Int4Group(activations="fp8")
    assert made.arithmetic.backward_operands == "high_precision"
    with pytest.raises(ConfigError, match="no such number format"):
        QATAligned("int5")
    with pytest.raises(ConfigError, match=r"fp8_row fixes how activations"):
        QATAligned("fp8_row", activations="fp8")
    with pytest.raises(ConfigError, match=r"null, fp8 or int8"):
        QATAligned("int4_group", activations="fp4")
    with pytest.raises(ConfigError, match=r"dequantized or high_precision.*'master'"):
        QATAligned("int4_group", backward="master")
