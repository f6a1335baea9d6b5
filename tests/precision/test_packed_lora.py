import copy
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from torch import nn

from lit_qrl import formats
from lit_qrl.errors import ConfigError
from lit_qrl.network.adapters import merged_weights, with_adapter
from lit_qrl.network.names import is_adapted
from lit_qrl.precision.packed_lora import NVFP4LoRA, PackedLoRA
from lit_qrl.precision.packed_source import fingerprint_of
from lit_qrl.precision.source import WeightSource, unchanged
from tests.families.configs import BY_TYPE, random_network
from tests.precision.toy import LINEARS, Module, Policy, batches, fit, network, trainer
from tests.stacked_experts import rounded

FORMATS = ("nvfp4", "mxfp4", "nf4", "int4_group:group_size=32")
OF_8_BITS = ("fp8_row", "fp8_block", "fp8_tensor", "int8_channel")
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def lora(targets=ALL, **options):
    targets = targets if isinstance(targets, str) else list(targets)
    return LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False, **options)


def configured(name="nvfp4", **options):
    policy = Policy(lora=lora(**options))
    policy.configure()
    packer = PackedLoRA(name)
    packer.configure_policy(policy)
    return policy, packer


@pytest.mark.parametrize("name", [*FORMATS, *OF_8_BITS])
def test_the_base_has_no_parameters_gradients_optimizer_state_or_place_in_the_checkpoint(name, tmp_path):
    module, run = fit(tmp_path, PackedLoRA(name), Module(Policy(lora=lora())))
    layers, of_8_bits = run.precision_plugin.packed(module), name in OF_8_BITS
    assert sorted(layers) == sorted(LINEARS)
    assert not any("base_layer.weight" in key for key, _ in module.named_parameters())
    trained = {key for key, parameter in module.named_parameters() if parameter.requires_grad}
    assert trained
    assert all("lora_" in key for key in trained)
    (optimizer,) = run.optimizers
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in module.parameters() if p.requires_grad}
    assert len(optimizer.state) == len(trained)
    for layer in layers.values():
        assert layer.kernel == ("format" if of_8_bits else "dequantize")
        assert layer.codes.element_size() == 1 if of_8_bits else not layer.codes.is_floating_point()
        assert layer.codes.numel() == layer.shape[0] * layer.shape[1] or not of_8_bits
        assert not layer._prepared
        assert all(p.grad is None for p in layer.parameters())
    keys = module.state_dict().keys()
    assert any("lora_A" in key for key in keys)
    assert not any(part in key for key in keys for part in ("codes", "scales", "base_layer.weight"))


def test_layers_without_an_adapter_are_packed_too_and_packing_is_idempotent():
    policy, packer = configured(targets=["q_proj", "v_proj"])
    before = packer.packed(policy)
    packer.configure_policy(policy)
    assert packer.packed(policy) == before
    assert sorted(before) == sorted(LINEARS)
    plain = [name for name, module in policy.network.named_modules() if type(module) is nn.Linear]
    assert all("lora_" in name or name == "lm_head" for name in plain)
    original = dict(network().named_parameters())
    amax = max(original[f"model.layers.0.self_attn.{p}_proj.weight"].abs().max() for p in "qkv")
    scales = {p: before[f"model.layers.0.self_attn.{p}_proj"].global_scale.item() for p in "qkvo"}
    assert scales["q"] == scales["k"] == scales["v"] == pytest.approx(448 * 6 / amax.item())  # an engine fuses them
    assert scales["o"] != scales["q"]


def source_of(name="nvfp4", format=None, **options):
    policy, packer = configured(name, **options)
    return policy, packer.source(policy, format or packer.format)


def test_the_shapes_are_of_the_packed_layers_and_in_another_format_of_all():
    _, source = source_of()
    assert list(source.shapes) == LINEARS
    assert source.shapes["model.layers.0.self_attn.k_proj"] == (32, 64)
    assert (source.aligned, source.packed) == (True, True)
    _, other = source_of(format=formats.get("fp8_row"))
    assert set(other.shapes) == set(LINEARS)
    assert (other.aligned, other.packed) == (False, True)


def test_fingerprints_tell_bases_apart():
    packed = [packer.packed(policy) for policy, packer in (configured() for _ in range(3))]
    packed[2][LINEARS[3]].codes[0, 0] ^= 1
    same, again, other = map(fingerprint_of, packed)
    assert same == again != other


def test_an_8_bit_base_is_scored_as_its_sampler_computes_and_one_of_4_bits_as_it_is():
    for name, kernel in (("fp8_row", "format"), ("nvfp4", "dequantize")):
        policy, source = source_of(name)
        layers = source.plugin.packed(policy).values()
        for layer in layers:
            layer.kernel = "dequantize"
        with source.as_sampled():
            assert {layer.kernel for layer in layers} == {kernel}
        assert {layer.kernel for layer in layers} == {"dequantize"}


def test_a_checkpoint_over_another_base_is_refused(tmp_path):
    _, run = fit(tmp_path, NVFP4LoRA(), Module(Policy(lora=lora())))
    run.save_checkpoint(tmp_path / "a.ckpt")
    other = Module(Policy(seed=3, lora=lora()))
    with pytest.raises(ConfigError, match="another base"):
        trainer(tmp_path, NVFP4LoRA(), epochs=2).fit(other, batches(), ckpt_path=tmp_path / "a.ckpt")


def test_what_holds_no_base_is_refused(tmp_path):
    assert NVFP4LoRA().format == formats.get("nvfp4")
    with pytest.raises(TypeError, match="format"):
        PackedLoRA()
    with pytest.raises(ConfigError, match=r"PackedLoRA holds a packed base.*weight-only format.*fp8_row.*Given: bf16"):
        PackedLoRA("bf16")
    with pytest.raises(ConfigError, match=r"weight-only.*activations=fp8.*QATAligned"):
        NVFP4LoRA(formats.Int4Group(activations="fp8"))
    with pytest.raises(ConfigError, match=r"nothing else to train.*model\.policy\.lora"):
        fit(tmp_path, NVFP4LoRA(), Module(Policy()))
    module = Module(Policy(lora=lora()))
    module.policy.configure()
    with pytest.raises(ConfigError, match="configure_policy"):
        NVFP4LoRA().convert_module(module)
    model = with_adapter(random_network(BY_TYPE["qwen3_moe"]), lora("all-linear"), "it")
    with pytest.raises(ConfigError, match=r"cannot share experts.*share_weights: false"):
        NVFP4LoRA(share_weights=True).configure_policy(SimpleNamespace(network=model.get_base_model(), lora=True))


def test_the_base_is_multiplied_out_by_option():
    policy, packer = Policy(lora=lora()), PackedLoRA("fp8_row", kernel="dequantize")
    policy.configure()
    packer.configure_policy(policy)
    assert {layer.kernel for layer in packer.packed(policy).values()} == {"dequantize"}


def test_trained_copies_of_layers_and_norms_stay_plain_and_are_exported():
    policy, packer = configured(targets=["q_proj", "up_proj"], modules_to_save=["down_proj", "norm"])
    assert sorted(packer.packed(policy)) == sorted(name for name in LINEARS if not name.endswith("down_proj"))
    copies = {
        f"{name}.weight": policy.network.get_submodule(name).modules_to_save["default"].weight
        for name in ("model.layers.1.mlp.down_proj", "model.norm")
    }
    for trained in copies.values():
        assert trained.requires_grad
        trained.data.add_(1)
    source = packer.source(policy, packer.format)
    for exported in (dict(source.base(None)), dict(source.plain(None))):
        assert all(torch.equal(exported[name], trained) for name, trained in copies.items())
        norms = {name for name, _ in network().named_parameters() if "norm" in name}
        assert {name for name in exported if "norm" in name} == norms


def test_a_gpu_without_fp8_multiplies_out_and_says_so(monkeypatch, tmp_path, caplog):
    lacking = {"what": "PackedLoRA multiplies in fp8_row.", "expected": "compute capability 8.9", "given": "8.0"}
    monkeypatch.setattr("lit_qrl.precision.packed_lora.lacking", lambda *_, **__: lacking)
    module, run = fit(tmp_path, PackedLoRA("fp8_row"), Module(Policy(lora=lora())))
    layers = run.precision_plugin.packed(module)
    assert {layer.kernel for layer in layers.values()} == {"dequantize"}
    assert "differ by the rounding of activations" in caplog.text
    source = run.precision_plugin.source(module.policy, run.precision_plugin.format)
    with source.as_sampled():  # a probe compares the sampler with the learner computing as that does
        assert {layer.kernel for layer in layers.values()} == {"format"}
    assert {layer.kernel for layer in layers.values()} == {"dequantize"}


@pytest.mark.parametrize("name", FORMATS)
def test_dequantization_compiles_into_one_graph(name):
    format = formats.get(name)
    q = format.quantize(torch.randn(32, 64))
    from lit_qrl.formats.base import QuantizedWeight

    def dequantize(codes, scales, global_scale):
        return format.dequantize(QuantizedWeight(codes, scales, global_scale, format, (32, 64)), torch.bfloat16)

    compiled = torch.compile(dequantize, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q.codes, q.scales, q.global_scale), format.dequantize(q, torch.bfloat16))


def packed_experts(kind, format="nvfp4"):
    """Return a model with stacked experts under an adapter, its base packed, and what the base was before."""
    plain = random_network(BY_TYPE[kind])
    torch.manual_seed(1)
    model = with_adapter(copy.deepcopy(plain), lora("all-linear"), "it")
    policy = SimpleNamespace(network=model.get_base_model(), model=model, lora=True)
    policy.named_weights = lambda: merged_weights(policy.network)
    packer = PackedLoRA(format)
    packer.configure_policy(policy)
    return policy, packer, plain


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "llama4_text"])
def test_packed_experts_compute_as_their_codes_stand_for_and_pass_gradients_on(kind):
    policy, packer, plain = packed_experts(kind)
    network, ids = policy.network, torch.arange(3, 13)[None]
    expected = rounded(kind, plain, packer.format)
    trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    assert all("lora_" in name for name in trained)
    assert not any(parameter.ndim == 3 for parameter in network.parameters())
    network(ids).logits.log_softmax(-1)[..., 5].sum().backward()
    first = network.get_parameter(next(name for name in trained if ".layers.0." in name and "lora_B" in name))
    assert first.grad.abs().sum() > 0  # through the experts of both layers
    for module in network.modules():
        if is_adapted(module):
            module.enable_adapters(False)
    with torch.no_grad():
        torch.testing.assert_close(network(ids).logits, expected(ids).logits, atol=1e-4, rtol=1e-5)
    merged = dict(merged_weights(network))
    assert set(merged) == {name for name, _ in plain.named_parameters()}
    for name, parameter in expected.named_parameters():
        if parameter.ndim == 3:
            torch.testing.assert_close(merged[name], parameter.detach(), atol=1e-6, rtol=1e-6)


def test_a_packed_base_with_experts_goes_out_as_it_is_held():
    policy, packer, plain = packed_experts("qwen3_moe")
    source = packer.source(policy, packer.format)
    sent = dict(source.base(None))
    codes = dict(
        WeightSource(SimpleNamespace(network=plain, named_weights=plain.named_parameters), packer.format).base(None)
    )
    assert set(sent) == set(codes)
    assert all(torch.equal(tensor.view(torch.uint8), sent[name].view(torch.uint8)) for name, tensor in codes.items())
    assert len([name for name in sent if ".experts." in name and name.endswith("packed")]) == 2 * 4 * 3
    other = packer.source(policy, formats.get("fp8_row"))  # the sum of base and adapter, in another format
    names = set(dict(other.whole(unchanged, None)))
    assert "model.layers.1.mlp.experts.3.up_proj.weight_scale" in names
