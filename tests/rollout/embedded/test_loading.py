import pytest
import torch
from transformers import LlamaConfig

from lit_qrl import formats
from lit_qrl.formats.base import QuantizedWeight
from lit_qrl.formats.numerics import with_bias
from lit_qrl.network.adapters import merged_weights
from lit_qrl.network.quantized_linear import QuantizedLinear
from lit_qrl.precision.layers.joined_linear import _Laid, lay_linears
from lit_qrl.receipts.ledger import RefusedError, SentLedger, compare
from lit_qrl.rollout.embedded.loading import Loader, Modules, skeleton
from tests.families.configs import BY_TYPE, random_network
from tests.networks import build_network
from tests.stacked_experts import rounded
from tests.vllm_engines import weights_of

CPU = torch.device("cpu")


def test_a_skeleton_has_buffers_and_no_weights():
    network = build_network()
    built = skeleton(network, CPU)
    assert type(built) is type(network)
    assert all(parameter.is_meta and not parameter.requires_grad for parameter in built.parameters())
    assert torch.equal(built.model.rotary_emb.inv_freq, network.model.rotary_emb.inv_freq)
    assert built.config is not network.config
    assert not built.training


def test_a_sharded_learners_sampler_is_of_the_plain_class():
    network = build_network()
    plain = type(network)
    network.__class__ = type(f"FSDP{plain.__name__}", (plain,), {})
    assert type(skeleton(network, CPU)) is plain


def test_a_layer_changes_between_plain_and_quantized_and_keeps_its_bias():
    modules = Modules(skeleton(build_network(LlamaConfig, attention_bias=True), CPU), CPU)
    name = "model.layers.0.self_attn.q_proj"
    bias, weight = torch.randn(modules.shapes[f"{name}.bias"]), torch.randn(modules.shapes[f"{name}.weight"])
    modules.set_plain(f"{name}.bias", bias)
    format = formats.get("fp8_row")
    exported = dict(format.export(format.quantize(weight), name))
    suffixes = {key.removeprefix(f"{name}."): tensor for key, tensor in exported.items()}
    modules.set_quantized(name, suffixes, format, cache=True)
    layer = modules.network.get_submodule(name)
    assert isinstance(layer, QuantizedLinear)
    assert torch.equal(layer.bias, bias)
    assert torch.equal(modules.held(f"{name}.weight").view(torch.uint8), exported[f"{name}.weight"].view(torch.uint8))
    assert modules.held(f"{name}.nothing") is None
    modules.set_plain(f"{name}.weight", weight)
    layer = modules.network.get_submodule(name)
    assert type(layer) is torch.nn.Linear
    x = torch.randn(2, weight.shape[1])
    torch.testing.assert_close(layer(x), x @ weight.T + bias)


def loaded(network, format, stream, version=0, modules=None):
    modules = modules or Modules(skeleton(network, CPU), CPU)
    Loader(modules, format, version, None, (), share=False, cache=True).load(stream)
    return modules


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_experts_change_between_formats_and_plain(kind):
    network, ids = random_network(BY_TYPE[kind]), torch.arange(3, 14)[None]
    modules = loaded(network, None, merged_weights(network))
    for version, name in enumerate(("fp8_row", None, "nvfp4", "int4_group", None), 1):
        format = None if name is None else formats.get(name)
        loaded(network, format, weights_of(network, format), version, modules)
        with torch.no_grad():
            got = modules.network(ids).logits
            if name in ("nvfp4", "int4_group"):
                expected = rounded(kind, network, format)(ids).logits
            else:
                expected = network(ids).logits
        assert torch.allclose(got, expected, atol=1e-4) is (name != "fp8_row")


def test_an_expert_that_is_missing_is_named():
    network, format = random_network(BY_TYPE["qwen3_moe"]), formats.get("fp8_row")
    stream = (one for one in weights_of(network, format) if "experts.2.down_proj" not in one[0])
    with pytest.raises(RefusedError, match=r"2 of 45 tensors are missing.*layers.0.mlp.experts.2.down_proj.weight"):
        loaded(network, format, stream)


def agrees(stream, loader):
    sent = SentLedger(loader.received.version)
    for name, tensor in stream:
        sent.record(name, tensor)
    return compare(sent, loader.received) == []


def test_weights_of_queries_keys_and_values_are_laid_one_below_another(monkeypatch):
    network = random_network(BY_TYPE["qwen2"])
    owned = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
    modules, ids = Modules(skeleton(network, CPU), CPU), torch.arange(3, 14)[None]
    modules.joins = True
    products = []
    compute = _Laid.compute
    monkeypatch.setattr(_Laid, "compute", lambda self, *all: products.append(len(self.sizes)) or compute(self, *all))
    layers, prefix = len(network.model.layers), "model.layers.0.self_attn."
    for version, name in enumerate([None, "fp8_row", None]):  # a format's codes stay as they are
        format = name and formats.get(name)
        loader = Loader(modules, format, version, None, owned, share=True, cache=True)
        loader.load(weights_of(network, format))
        products.clear()
        with torch.no_grad():
            got = modules.network(ids).logits
        assert len(products) == (0 if name else layers)
        if name:
            continue
        torch.testing.assert_close(got, network(ids).logits, atol=1e-5, rtol=1e-5)
        held = [modules.held(f"{prefix}{layer}.weight") for layer in ("q_proj", "k_proj", "v_proj")]
        assert len({one.untyped_storage().data_ptr() for one in held} - owned) == 1
        assert agrees(weights_of(network), loader)
        held[1].view(-1)[5] += 1  # what is multiplied is what the receipts are of
        with torch.no_grad():
            assert not torch.equal(modules.network(ids).logits, got)


@pytest.mark.parametrize("name", ["fp8_row", "int8_channel"])
def test_codes_of_layers_that_read_one_input_are_laid_one_below_another(monkeypatch, name):
    network, ids = random_network(BY_TYPE["qwen2"]), torch.arange(3, 14)[None]
    format, layers, rows = formats.get(name), len(network.model.layers), []

    def multiply(self, x, codes, scale, bias):
        rows.append(len(codes))
        weight = self.dequantize(QuantizedWeight(codes, scale, None, self, tuple(codes.shape)))
        return with_bias(self.emulate(x.reshape(-1, x.shape[-1]), weight), bias, x.dtype)

    monkeypatch.setattr(type(format), "has_gemm", lambda *_: True)
    monkeypatch.setattr(type(format), "multiply", multiply)
    alone, modules = loaded(network, format, weights_of(network, format)), Modules(skeleton(network, CPU), CPU)
    modules.joins = True
    for version in range(2):  # codes that come later are laid as well
        loader = Loader(modules, format, version, None, (), share=False, cache=True)
        loader.load(weights_of(network, format))
        with torch.no_grad():
            expected = alone.network(ids).logits
            rows.clear()
            torch.testing.assert_close(modules.network(ids).logits, expected, atol=1e-5, rtol=1e-5)
        assert len(rows) == 4 * layers
        assert agrees(weights_of(network, format), loader)
    mlp = modules.network.model.layers[0].mlp
    assert mlp.gate_proj.codes.data_ptr() + mlp.gate_proj.codes.numel() == mlp.up_proj.codes.data_ptr()
    mlp.up_proj.codes.view(torch.uint8).zero_()  # what is multiplied is what the receipts are of
    with torch.no_grad():
        assert not torch.allclose(modules.network(ids).logits, expected, atol=1e-3)


def test_layers_laid_together_compute_alone_under_autocast():
    network = random_network(BY_TYPE["qwen2"]).requires_grad_(False)
    lay_linears(network)
    group, x = network.model.layers[0].self_attn.q_proj.together, torch.zeros(1, network.config.hidden_size)
    with torch.no_grad():
        assert group.takes(x)
        assert not group.takes(x.bfloat16())
        with torch.autocast("cpu", torch.bfloat16):
            assert not group.takes(x)
