"""What needs a CUDA device: low-bit GEMMs against their emulation, fused quantizers against plain operations."""

import copy
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from torch import nn

from lit_qrl.errors import ConfigError
from lit_qrl.formats import MXFP4, NF4, NVFP4, FP8Block, FP8Row, FP8Tensor, Int4Group, Int8Channel
from lit_qrl.formats.base import QuantizedWeight
from lit_qrl.formats.kernels import dispatch
from lit_qrl.network.quantized_linear import QuantizedLinear
from lit_qrl.precision import PackedLoRA, QATAligned, UnifiedFP8
from lit_qrl.precision.layers import block_fp8
from lit_qrl.precision.layers.low_bit import LowBitLinear
from lit_qrl.precision.layers.packed_linear import moved
from lit_qrl.precision.packed_lora import PackedLinear
from lit_qrl.precision.source import unchanged
from lit_qrl.precision.unified_fp8 import Unified
from tests.formats.oracle import bits, weights
from tests.precision.toy import Module, Policy, configured

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


def unified(backend):
    arithmetic = Unified(FP8Block())
    arithmetic.take(block_fp8.backend(backend))
    return arithmetic


NATIVE = [FP8Tensor(), FP8Tensor("token"), FP8Row(), FP8Block(), Int8Channel()]
# A tensor core of SM90 takes 32 FP8 products a step: it shifts them and the running sum to the largest exponent among
# them and keeps 13 bits below its leading one. After 128 products (without fast accumulation) the sum goes to fp32.
STEP, PROMOTED, KEPT_BITS = 32, 128, 13
# What remains of the errors of a row or column of outputs: random signs, so far below the sum of their bounds.
RELATIVE_NORM = 2.0**-7


def ulps_apart(a, b):
    """Distance of two bf16 tensors in representable numbers."""
    order = [t.cpu().contiguous().view(torch.int16).int() for t in (a, b)]
    order = [torch.where(t < 0, -(t & 0x7FFF), t) for t in order]
    return (order[0] - order[1]).abs()


@pytest.mark.parametrize("rows", [1, 17, 256, 1000])
@pytest.mark.parametrize("format", NATIVE, ids=str)
def test_the_gemm_equals_its_emulation_within_one_ulp(format, rows):
    torch.manual_seed(0)
    # all terms positive: every output has all its digits
    weight = torch.rand(512, 1024, dtype=torch.bfloat16) * 0.05
    x = torch.rand(rows, 1024, dtype=torch.bfloat16) * torch.rand(rows, 1).bfloat16()
    q = format.quantize(weight)
    on_device = moved(q, DEVICE)
    assert format.prepare(on_device, torch.bfloat16).native
    native, emulated = format.linear(x.to(DEVICE), on_device), format.linear(x, q)
    assert native.dtype == emulated.dtype == torch.bfloat16
    assert ulps_apart(native, emulated).max() <= 1


def accumulation_bound(x, weight):
    """Largest error of each output "m n" of `x` ("m k") by `weight` ("n k") that a tensor core's steps can make."""
    bound = torch.zeros(x.shape[0], weight.shape[0], device=x.device)
    for start in range(0, x.shape[1], PROMOTED):
        partial = torch.zeros_like(bound)
        for step in range(start, start + PROMOTED, STEP):
            products = x[:, None, step : step + STEP] * weight[None, :, step : step + STEP]
            largest = torch.maximum(products.abs().amax(-1), partial.abs())
            bound += (STEP + 1) * 2.0**-KEPT_BITS * largest
            partial += products.sum(-1)
    return bound


def disagreement(native, emulated, bound):
    """Return what is wrong with `native`, bf16, given exact fp32 `emulated` and the bound of its sums, or None."""
    difference = (native.float() - emulated).abs()
    ulp = emulated.abs().clamp_min(torch.finfo(torch.bfloat16).tiny).log2().floor().exp2() * 2.0**-7
    if not bool((difference <= 0.51 * ulp + bound).all()):
        return f"an output is off by {float((difference - 0.51 * ulp - bound).max())} more than the sums can be"
    for dim in (0, 1):
        relative = difference.norm(dim=dim) / emulated.norm(dim=dim)
        if float(relative.max()) > RELATIVE_NORM:
            return f"{'column' if dim == 0 else 'row'} {int(relative.argmax())} is off by {float(relative.max())}"
    return None


@pytest.mark.parametrize("format", NATIVE, ids=str)
def test_the_gemm_equals_its_emulation_on_normal_weights(format):
    torch.manual_seed(0)
    weight, bias = torch.randn(512, 1024).bfloat16() * 0.05, torch.randn(512).bfloat16()
    x = (torch.randn(300, 1024) * torch.rand(300, 1)).bfloat16()
    q = format.quantize(weight)
    on_device = moved(q, DEVICE)
    native = format.linear(x.to(DEVICE), on_device)
    emulated = format.linear(x.float(), q).to(DEVICE)
    # activations are rounded by up to a sixteenth; INT8 sums are exact
    exact = isinstance(format, Int8Channel)
    factors = x.to(DEVICE).float(), format.dequantize(on_device)
    bound = accumulation_bound(*factors) * (0.0 if exact else 1.0625)
    bound += factors[0].abs() @ factors[1].abs().t() * 2.0**-20  # the emulation itself sums in fp32
    assert disagreement(native, emulated, bound) is None
    # an FP8 product leaves its GEMM rounded, and the bias is added to that; an INT8 one is rounded after the bias
    product = format.linear(x.to(DEVICE).float(), on_device) if exact else native
    biased = format.linear(x.to(DEVICE), on_device, bias.to(DEVICE))
    assert torch.equal(biased, (product + bias.to(DEVICE)).bfloat16())
    # one scale wrong by an eighth in one place shows
    wrong = q.scales.clone().view(-1)
    wrong[wrong.numel() // 2] *= 1.125
    spoiled = QuantizedWeight(q.codes, wrong.view(q.scales.shape), q.global_scale, q.format, q.shape)
    assert disagreement(format.linear(x.to(DEVICE), moved(spoiled, DEVICE)), emulated, bound) is not None
    # and so do two rows in each other's place
    order = torch.arange(512)
    order[[7, 8]] = order[[8, 7]]
    assert disagreement(native[:, order.to(DEVICE)], emulated, bound) is not None


@pytest.mark.parametrize("shape", [(512, 1024), (2048, 1536), (1536, 8960)], ids=str)
@pytest.mark.parametrize("format", [FP8Tensor("token"), FP8Row(), FP8Block()], ids=str)
def test_a_row_comes_out_the_same_however_many_there_are(format, shape):
    torch.manual_seed(0)
    q = format.quantize((torch.randn(shape, device=DEVICE) * 0.02).bfloat16())
    x = torch.randn(3000, shape[1], device=DEVICE).bfloat16()
    whole = format.linear(x, q)
    for rows in (1, 5, 16, 64, 200, 1000, 2048):
        assert torch.equal(format.linear(x[:rows], q), whole[:rows]), rows


@pytest.mark.parametrize("activations", ["fp8", "int8"])
def test_int4_weights_under_8_bit_activations_equal_the_cpu_s(activations):
    torch.manual_seed(0)
    format = Int4Group(activations=activations)
    weight, x = torch.rand(256, 512).bfloat16(), torch.rand(64, 512).bfloat16()
    q = format.quantize(weight)
    native, emulated = format.linear(x.to(DEVICE), moved(q, DEVICE)), format.linear(x, q)
    # the device rounds each weight to bf16 and the product before its scale: three roundings against one
    assert ulps_apart(native, emulated).max() <= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", list(weights(torch.float32)))
def test_fused_weight_quantizers_are_the_plain_operations(case, dtype, monkeypatch):
    weight = weights(dtype)[case].to(DEVICE)
    assert dispatch.available(weight, "values")
    for format in (FP8Row(), FP8Block(), Int4Group(32), Int4Group(128)):
        one_pass = format.quantize(weight)
        with monkeypatch.context() as patch:
            patch.setattr(dispatch, "available", lambda x, kernel: False)
            plain = format.quantize(weight)
            values = {kind: format.dequantize(plain, kind) for kind in (torch.float32, torch.bfloat16)}
        assert torch.equal(bits(one_pass.scales), bits(plain.scales))
        assert torch.equal(bits(one_pass.codes), bits(plain.codes))
        for kind, expected in values.items():
            assert torch.equal(format.dequantize(one_pass, kind), expected)


def test_fused_quantizers_show_what_is_not_finite():
    x = torch.randn(256, 256, device=DEVICE)
    for value in (float("nan"), float("inf")):
        broken = x.clone()
        broken[3, 5] = value
        for format in (FP8Block(), Int4Group(32), NVFP4()):
            with pytest.raises(ValueError, match="NaN or inf"):
                format.quantize(broken)
        assert torch.isnan(FP8Block().linear(broken.bfloat16(), FP8Block().quantize(x.bfloat16()))).any()


@pytest.mark.parametrize("name", ["torch", "te"])
def test_the_three_gemms_agree_with_their_emulation(name):
    if name == "te" and find_spec("transformer_engine") is None:
        with pytest.raises(ConfigError, match="The FP8 backend te cannot run here"):
            block_fp8.backend(name)
        return
    torch.manual_seed(0)
    linear = nn.Linear(512, 768).bfloat16()
    layers = {}
    for backend, device in (("emulate", "cpu"), (name, DEVICE)):
        layer = LowBitLinear.from_linear(copy.deepcopy(linear).to(device), "layer", unified(backend))
        x = torch.randn(2, 300, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
        x = x.to(device).requires_grad_()
        out = layer(x)
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).bfloat16().to(device))
        layers[backend] = [t.detach().cpu().float() for t in (out, x.grad, layer.weight.grad, layer.bias.grad)]
    for ours, theirs in zip(layers[name], layers["emulate"], strict=True):
        # Each product of a tensor core's step keeps about 13 bits below the largest one, which is 2e-3 of a sum whose
        # terms have random signs (2.8e-3 measured with the rounding to bf16); Transformer Engine multiplies by an
        # inverse scale besides, which moves a code in a few of a thousand.
        assert (ours - theirs).norm() / theirs.norm() < (4e-3 if name == "torch" else 6e-3)


def test_inputs_are_kept_in_eight_bits_on_the_device():
    plain = nn.Linear(4096, 4096, bias=False, device=DEVICE, dtype=torch.bfloat16)
    layer = LowBitLinear.from_linear(plain, "layer", unified("torch"))
    x = torch.randn(8192, 4096, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    layer(x)
    before = torch.cuda.memory_allocated()
    out = layer(x)
    kept = torch.cuda.memory_allocated() - before - out.numel() * 2
    assert kept < x.numel() * 1.1


FOUR_BITS = [Int4Group(32), Int4Group(32, "fp8"), Int4Group(32, "int8"), NVFP4(), MXFP4(), NF4()]


@pytest.mark.parametrize("format", [*NATIVE, *FOUR_BITS], ids=str)
@pytest.mark.parametrize("backward", ["dequantized", "high_precision"])
def test_an_aligned_layer_s_gradients_are_the_cpu_s(format, backward):
    torch.manual_seed(0)
    plain, x = nn.Linear(256, 256, dtype=torch.bfloat16), torch.randn(96, 256).bfloat16()
    upstream, found = torch.randn(96, 256).bfloat16(), []
    for device in ("cpu", DEVICE):
        model, plugin = nn.Sequential(copy.deepcopy(plain)).to(device), QATAligned(format, backward=backward)
        plugin.convert_module(model)
        own = x.detach().to(device).requires_grad_()
        model(own).backward(upstream.to(device))
        found.append([own.grad.cpu().double().flatten(), model[0].weight.grad.cpu().double().flatten()])
    for here, there in zip(*found, strict=True):
        assert torch.cosine_similarity(here, there, dim=0) > 0.9999
    policy = SimpleNamespace(network=model, named_weights=model.named_parameters)
    exported = dict(plugin.source(policy, format).whole(unchanged, None))
    assert all(tensor.is_cuda for name, tensor in exported.items() if not name.endswith("shape"))


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "nf4", "int4_group"])
def test_compiled_dequantization_is_the_plain_one_and_nothing_is_kept(name):
    torch.manual_seed(0)
    from lit_qrl import formats

    format = formats.get(name)
    weight = torch.randn(1024, 2048, device=DEVICE, dtype=torch.bfloat16) * 0.02
    layer = PackedLinear(format, (1024, 2048), cache=False).to(DEVICE)
    layer.set_weight(format.quantize(weight))
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(layer.dequantized(dtype), format.dequantize(layer.weight, dtype))
    x = torch.randn(64, 2048, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    out = layer(x)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    del out
    assert held - torch.cuda.memory_allocated() < weight.numel()


def test_the_unified_plugin_picks_a_backend_that_runs():
    plugin = UnifiedFP8("auto", exclude=["*self_attn*"])
    module = configured(dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"do not fit the FP8 GEMM.*\(128, 64\)"):
        plugin.convert_module(module.to(DEVICE))
    assert plugin.backend.name in ("te", "torch")


@pytest.mark.parametrize("format", [FP8Row(), FP8Block(), FP8Tensor("token"), Int8Channel()], ids=str)
def test_a_packed_base_of_8_bits_multiplies_as_the_embedded_sampler_and_keeps_no_second_copy(format):
    """The reference of the gradient is the codes times their scales in double precision."""
    torch.manual_seed(0)
    linear = nn.Linear(1024, 512, bias=False, device=DEVICE, dtype=torch.bfloat16)
    q = format.quantize(linear.weight)
    layer, sampler = PackedLinear(format, q.shape, cache=False), QuantizedLinear(format, q.shape)
    for one in (layer, sampler):
        one.set_weight(q)
    layer.kernel = "format"
    x = torch.randn(2, 96, 1024, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    out = layer(x)
    assert torch.equal(out.detach(), sampler(x.detach()))
    upstream = torch.randn_like(out)
    before = torch.cuda.memory_allocated()
    (grad,) = torch.autograd.grad(out, x, upstream)
    assert torch.cuda.memory_allocated() - before <= grad.nbytes + 2**20
    scales = q.scales.double()
    if isinstance(format, FP8Block):
        scales = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    expected = upstream.double() @ (q.codes.double() * scales)
    torch.testing.assert_close(grad.double(), expected, atol=2e-2, rtol=2e-2)
    cosine = torch.nn.functional.cosine_similarity(grad.double().flatten(), expected.flatten(), dim=0)
    assert cosine > 0.99999


@pytest.mark.parametrize("format", ["fp8_row", "fp8_block", "nvfp4"])
def test_a_policy_over_a_packed_base_has_the_gradients_of_its_dequantized_twin(format):
    """Under one adapter: rounded inputs, as 8 bits have them, move the gradient of its factors by little."""
    grads = []
    for kernel in ("auto", "dequantize"):
        options = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
        policy = Policy(lora=options, dtype=torch.bfloat16)
        policy.configure()
        plugin = PackedLoRA(format, kernel=kernel, autocast="bf16")
        plugin.configure_policy(policy)
        plugin.convert_module(Module(policy).to(DEVICE))
        with plugin.forward_context():
            policy(torch.arange(24, device=DEVICE).view(4, 6)).log_softmax(-1)[..., 3].sum().backward()
        grads.append(torch.cat([p.grad.flatten().float() for p in policy.parameters() if p.requires_grad]))
    assert torch.nn.functional.cosine_similarity(*grads, dim=0) > 0.95
    assert format == "nvfp4" or not torch.equal(*grads)
