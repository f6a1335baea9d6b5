"""What the learner's precision plugins have in common, under a real Trainer: runs beside one another."""

import copy
from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig

from lit_qrl.formats import MXFP4, NF4, NVFP4, FP8Block, FP8Row, FP8Tensor, Int4Group, Int8Channel
from lit_qrl.network.linears import swap_linears
from lit_qrl.network.quantized_linear import QuantizedLinear
from lit_qrl.precision import NVFP4LoRA, PackedLoRA, QATAligned, UnifiedFP8
from lit_qrl.precision.layers.low_bit import LowBitLinear
from lit_qrl.precision.source import unchanged
from tests.precision.toy import LINEARS, Module, Policy, fit, network, resumed_equals_uninterrupted, weights_of

PLUGINS = {
    "aligned": lambda: QATAligned(Int4Group(32)),
    "aligned_block": lambda: QATAligned(FP8Block()),
    "aligned_row": lambda: QATAligned(FP8Row()),
    "aligned_tensor": lambda: QATAligned(FP8Tensor()),
    "aligned_nvfp4": lambda: QATAligned(NVFP4()),
    "unified": lambda: UnifiedFP8("emulate"),
    "lora": lambda: NVFP4LoRA(),
    "lora_mxfp4": lambda: PackedLoRA(MXFP4()),
    "lora_nf4": lambda: PackedLoRA(NF4()),
    "lora_int4": lambda: PackedLoRA(Int4Group(32)),
    "lora_row": lambda: PackedLoRA(FP8Row()),
    "lora_block": lambda: PackedLoRA(FP8Block()),
    "lora_tensor": lambda: PackedLoRA(FP8Tensor()),
    "lora_int8": lambda: PackedLoRA(Int8Channel()),
}


def module(name, checkpointing=False, **options):
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    return Module(Policy(lora=lora if "lora" in name else None, checkpointing=checkpointing), **options)


def converted(name):
    made, plugin = module(name), PLUGINS[name]()
    made.policy.configure()
    plugin.convert_module(made)
    return made, plugin


class Compiled(Module):
    """Compiles the network's forward pass; the backend runs the captured graphs as they are."""

    graphs = 0

    def training_step(self, batch, index):
        if self.graphs == 0:
            self.policy.network.forward = torch.compile(self.policy.network.forward, backend=self.count)
        return super().training_step(batch, index)

    def count(self, graph, inputs):
        self.graphs += 1
        return graph.forward


@pytest.mark.parametrize("name", ["aligned", "aligned_block", "aligned_row", "unified", "lora"])
def test_checkpointing_changes_nothing(name, tmp_path):
    plain, _ = fit(tmp_path, PLUGINS[name](), module(name))
    saving, _ = fit(tmp_path, PLUGINS[name](), module(name, checkpointing=True))
    assert plain.losses == saving.losses
    for key, weight in weights_of(plain).items():
        assert torch.equal(weight, weights_of(saving)[key]), key


@pytest.mark.slow
@pytest.mark.parametrize("name", ["aligned", "aligned_block", "unified", "lora"])
def test_a_compiled_network_learns_the_same(name, tmp_path):
    torch._dynamo.reset()
    plain, _ = fit(tmp_path, PLUGINS[name](), module(name))
    compiled = Compiled(module(name).policy)
    fit(tmp_path, PLUGINS[name](), compiled)
    assert compiled.graphs > 0
    assert len(set(plain.losses)) == len(plain.losses)  # it learned, with weights quantized anew in every step
    assert torch.allclose(torch.tensor(plain.losses), torch.tensor(compiled.losses), rtol=1e-5)


@pytest.mark.parametrize("name", ["aligned", "unified", "lora", "lora_mxfp4", "lora_nf4", "lora_int4", "lora_row"])
def test_resume_continues_bit_for_bit(name, tmp_path):
    whole, second, losses, joined = resumed_equals_uninterrupted(tmp_path, PLUGINS[name], lambda: module(name))
    assert joined == losses
    assert all(torch.equal(whole[key], second[key]) for key in whole)


@pytest.mark.parametrize("name", ["aligned_row", "unified"])
def test_accumulation_sees_one_weight_per_step(name, tmp_path, monkeypatch):
    plugin, calls = PLUGINS[name](), []
    kind = type(plugin.format)
    original = kind.quantize
    monkeypatch.setattr(kind, "quantize", lambda *a: calls.append(1) or original(*a))
    fit(tmp_path, plugin, accumulate_grad_batches=2)
    assert len(calls) == 2 * len(LINEARS)


@pytest.mark.parametrize("name", ["aligned", "unified"])
def test_converting_leaves_the_state_dict_alone_and_is_idempotent(name):
    made, plugin = module(name), PLUGINS[name]()
    made.policy.configure()
    before = {key: (tensor.shape, tensor.dtype, tensor.data_ptr()) for key, tensor in made.state_dict().items()}
    plugin.convert_module(made)
    layers = plugin.layers(made)
    assert sorted(layers) == sorted(LINEARS)
    source = plugin.source(made.policy, plugin.format)
    assert source.shapes["model.layers.0.self_attn.k_proj"] == (32, 64)
    assert [key for key, _ in source.plain(None)] == [key for key, _ in made.policy.named_weights()]
    plugin.convert_module(made)
    assert plugin.layers(made) == layers
    made.policy(torch.zeros(1, 4, dtype=torch.long))
    after = {key: (tensor.shape, tensor.dtype, tensor.data_ptr()) for key, tensor in made.state_dict().items()}
    assert list(after.items()) == list(before.items())
    assert not isinstance(made.policy.network.lm_head, LowBitLinear)


@pytest.mark.parametrize("name", PLUGINS)
def test_an_embedded_sampler_over_what_is_published_gives_the_learners_logits(name):
    """The published tensors in layers of `QuantizedLinear`, bit for bit; of a base, without its adapter."""
    made, plugin = module(name), PLUGINS[name]()
    made.policy.configure()
    plugin.configure_policy(made.policy)
    if "lora" not in name:
        plugin.convert_module(made)
    source, sampler = plugin.source(made.policy, plugin.format), network(seed=9)
    published = dict(source.base(None) if "lora" in name else source.whole(unchanged, None))
    swap_linears(sampler, lambda _, linear: QuantizedLinear.from_linear(linear, plugin.format))
    plain = {key: tensor for key, tensor in published.items() if key.rsplit(".", 1)[0] not in LINEARS}
    assert sampler.load_state_dict(plain, strict=False).unexpected_keys == []
    for layer in LINEARS:
        part = {k.removeprefix(layer + "."): t for k, t in published.items() if k.startswith(layer + ".")}
        sampler.get_submodule(layer).load(part)
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad(), made.policy.model.disable_adapter() if "lora" in name else nullcontext():
        assert torch.equal(made.policy(tokens), sampler(input_ids=tokens, use_cache=False).logits)


@pytest.mark.parametrize("name", ["aligned_tensor", "unified"])
def test_a_copy_of_the_policy_computes_alone(name):
    made, plugin = converted(name)
    tokens = torch.arange(6).view(1, 6)
    with torch.no_grad():
        before = made.policy(tokens)
        frozen = copy.deepcopy(made.policy)
        for layer in plugin.layers(made).values():
            layer.weight.mul_(1.5)
        assert not torch.equal(made.policy(tokens), before)
        assert torch.equal(frozen(tokens), before)
    copied = plugin.layers(frozen)
    assert all(part in copied.values() for part in copied[LINEARS[0]].siblings)
