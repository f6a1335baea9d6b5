import copy

import pytest
import torch
from torch import nn

from lit_qrl import formats
from lit_qrl.errors import ConfigError
from lit_qrl.network.stream import weight_stream
from lit_qrl.precision.base import StepClock
from lit_qrl.precision.qat import AlignedLinear, QATAligned
from lit_qrl.precision.source import unchanged
from tests.precision.toy import (
    HIDDEN,
    LINEARS,
    Module,
    Policy,
    batches,
    fit,
    network,
    resumed_equals_uninterrupted,
    trainer,
)

FORMATS = {
    "fp8_tensor": {},
    "fp8_row": {},
    "fp8_block": {},
    "int8_channel": {},
    "int4_group": {"group_size": 32},
    "nvfp4": {},
    "mxfp4": {},
    "nf4": {},
}


def aligned(linear, format):
    return AlignedLinear.from_linear(linear, "layer", format, StepClock())


def plugin(name="int4_group"):
    return QATAligned(formats.get(name, **FORMATS[name]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_forward_is_the_format_and_backward_is_the_plain_layer(name, dtype):
    torch.manual_seed(0)
    plain = nn.Linear(64, 32).to(dtype)
    layer = aligned(copy.deepcopy(plain), formats.get(name, **FORMATS[name]))
    x = torch.randn(2, 5, 64).to(dtype)
    upstream = torch.randn(2, 5, 32).to(dtype)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    out, reference = layer(inputs[0]), plain(inputs[1])
    assert torch.equal(out, layer.format.linear(x, layer.format.quantize(plain.weight), plain.bias))
    assert not torch.equal(out, reference)
    out.backward(upstream)
    reference.backward(upstream)
    for ours, theirs in [
        (inputs[0].grad, inputs[1].grad),
        (layer.weight.grad, plain.weight.grad),
        (layer.bias.grad, plain.bias.grad),
    ]:
        assert ours.dtype == theirs.dtype
        assert torch.allclose(ours, theirs, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


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


def test_convert_module_leaves_the_state_dict_alone_and_is_idempotent():
    module = Module(Policy())
    module.policy.configure()
    before = {name: (tensor.shape, tensor.dtype, tensor.data_ptr()) for name, tensor in module.state_dict().items()}
    qat = plugin()
    qat.convert_module(module)
    layers = qat.layers(module)
    assert sorted(layers) == sorted(LINEARS)
    assert sorted(qat.report.swapped) == sorted(LINEARS)
    source = qat.source(module.policy, qat.format)
    assert source.shapes()["model.layers.0.self_attn.k_proj"] == (32, 64)
    assert [name for name, _ in source.plain(None)] == [name for name, _ in module.policy.named_weights()]
    qat.convert_module(module)
    assert qat.layers(module) == layers
    after = {name: (tensor.shape, tensor.dtype, tensor.data_ptr()) for name, tensor in module.state_dict().items()}
    assert after == before
    module.policy(torch.zeros(1, 4, dtype=torch.long))
    assert list(module.state_dict()) == list(before)
    assert not isinstance(module.policy.network.lm_head, AlignedLinear)


@pytest.mark.parametrize("name", ["fp8_tensor", "nvfp4", "int4_group", "fp8_block"])
def test_what_is_published_is_what_the_forward_used(name, tmp_path):
    qat = plugin(name)
    module, _ = fit(tmp_path, qat)
    published = dict(qat.source(module.policy, qat.format).whole(unchanged, None))
    again = dict(weight_stream(module.policy.named_weights(), qat.format, LINEARS))
    assert list(published) == list(again)
    layers = qat.layers(module)
    for layer_name, layer in layers.items():
        for key, tensor in layer.format.export(layer.quantized(), layer_name):
            if not key.endswith("weight_shape"):
                assert published[key].data_ptr() == tensor.data_ptr()
            assert torch.equal(again[key].view(torch.uint8), tensor.view(torch.uint8))
    for part in layers.values():  # and it is the current weight's, after the last update
        shared = torch.stack([s.weight.abs().amax() for s in part.siblings]).amax()
        fresh = qat.format.quantize(part.weight, shared if qat.format.shares_amax else None)
        assert torch.equal(fresh.codes.view(torch.uint8), part.quantized().codes.view(torch.uint8))


def test_a_perturbed_weight_is_quantized_anew_and_a_perturbed_norm_passes():
    module = Module(Policy())
    module.policy.configure()
    qat = plugin("fp8_tensor")
    qat.convert_module(module)
    target, norm = "model.layers.0.self_attn.k_proj.weight", "model.norm.weight"

    def perturbed(name, tensor):
        return tensor * 8 if name in (target, norm) else tensor

    changed = ((name, perturbed(name, tensor)) for name, tensor in module.policy.named_weights())
    expected = dict(weight_stream(changed, qat.format, LINEARS))
    published = dict(qat.source(module.policy, qat.format).whole(perturbed, None))
    assert list(published) == list(expected)
    assert all(torch.equal(published[k].view(torch.uint8), expected[k].view(torch.uint8)) for k in expected)


@pytest.mark.parametrize("name", ["fp8_row", "int4_group"])
def test_learner_and_sampler_agree(name):
    """The published tensors, multiplied by QuantizedLinear layers, give the learner's logits bit for bit."""
    from lit_qrl.network.linears import swap_linears
    from lit_qrl.network.quantized_linear import QuantizedLinear

    module = Module(Policy())
    module.policy.configure()
    qat = plugin(name)
    sampler = copy.deepcopy(module.policy.network)
    qat.convert_module(module)
    swap_linears(sampler, lambda _, linear: QuantizedLinear.from_linear(linear, qat.format))
    published = dict(qat.source(module.policy, qat.format).whole(unchanged, None))
    for layer in LINEARS:
        tensors = {k.removeprefix(layer + "."): t for k, t in published.items() if k.startswith(layer + ".")}
        sampler.get_submodule(layer).load(tensors)
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        assert torch.equal(module.policy(tokens), sampler(input_ids=tokens, use_cache=False).logits)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradient_checkpointing_changes_nothing(tmp_path, checkpointing):
    reference, _ = fit(tmp_path, plugin("fp8_row"))
    module, _ = fit(tmp_path, plugin("fp8_row"), Module(Policy(checkpointing=checkpointing)))
    assert module.losses == pytest.approx(reference.losses, rel=1e-6)


def test_accumulation_sees_one_weight_per_step(tmp_path, monkeypatch):
    format = formats.get("fp8_row")
    calls = []
    original = type(format).quantize
    monkeypatch.setattr(type(format), "quantize", lambda *a: calls.append(1) or original(*a))
    fit(tmp_path, QATAligned(format), accumulate_grad_batches=2)
    assert len(calls) == 2 * len(LINEARS)


def test_resume_continues_bit_for_bit(tmp_path):
    whole, second, losses, joined = resumed_equals_uninterrupted(tmp_path, plugin, lambda: Module(Policy()))
    assert joined == losses
    assert all(torch.equal(whole[name], second[name]) for name in whole)


def test_a_checkpoint_of_the_plain_run_fits(tmp_path):
    _, run = fit(tmp_path, None)
    run.save_checkpoint(tmp_path / "plain.ckpt")
    quantized = Module(Policy())
    trainer(tmp_path, plugin(), epochs=2).fit(quantized, batches(), ckpt_path=tmp_path / "plain.ckpt")
    assert len(quantized.losses) == 4


def test_the_plugin_touches_neither_default_dtype_nor_batch(tmp_path):
    module, run = fit(tmp_path, plugin())
    assert set(module.seen) == {(torch.float32, torch.int64)}
    batch = {"logprobs": torch.randn(3)}
    assert run.precision_plugin.convert_input(batch) is batch
    assert run.precision_plugin.convert_output(batch) is batch


def test_autocast_runs_in_bf16_over_fp32_masters(tmp_path):
    qat = QATAligned(formats.get("fp8_row"), autocast="bf16")
    module, _ = fit(tmp_path, qat)
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    layer = next(iter(qat.layers(module).values()))
    with qat.forward_context():
        out = layer(torch.randn(2, HIDDEN))
    assert out.dtype == torch.bfloat16
    assert layer.quantized().scales.dtype == torch.float32


def test_training_learns_through_the_quantizer(tmp_path):
    module, _ = fit(tmp_path, plugin("int4_group"), Module(Policy(), steps_lr=5e-3), epochs=12)
    assert sum(module.losses[-4:]) < 0.8 * sum(module.losses[:4])


def test_a_copy_of_the_policy_has_its_own_cache():
    module = Module(Policy())
    module.policy.configure()
    qat = plugin("fp8_tensor")
    qat.convert_module(module)
    tokens = torch.arange(6).view(1, 6)
    with torch.no_grad():
        before = module.policy(tokens)
        frozen = copy.deepcopy(module.policy)
        for layer in qat.layers(module).values():
            layer.weight.mul_(1.5)
        assert not torch.equal(module.policy(tokens), before)
        assert torch.equal(frozen(tokens), before)
    copied = qat.layers(frozen)
    assert all(part in copied.values() for part in copied[LINEARS[0]].siblings)


def test_compiled_equals_eager():
    layer = aligned(nn.Linear(64, 32), formats.get("fp8_row"))
    compiled = torch.compile(layer, backend="eager")
    x = torch.randn(4, 64, requires_grad=True)
    assert torch.equal(compiled(x), layer(x))
    compiled(x).sum().backward()
    assert layer.weight.grad is not None


def test_names_and_options_are_checked():
    assert QATAligned("int4_group", activations="fp8").format == formats.Int4Group(activations="fp8")
    with pytest.raises(ConfigError, match="no such number format"):
        QATAligned("int5")
    with pytest.raises(ConfigError, match=r"fp8_row fixes how activations"):
        QATAligned("fp8_row", activations="fp8")
    with pytest.raises(ConfigError, match=r"null, fp8 or int8"):
        QATAligned("int4_group", activations="fp4")


def test_the_network_itself_may_be_converted():
    model = network()
    plugin("fp8_row").convert_module(model)
    assert isinstance(model.model.layers[0].mlp.up_proj, AlignedLinear)
