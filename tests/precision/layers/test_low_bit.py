"""Experts of the learner in a number format: as the sampler has them, and with the gradients of the rounded model."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lit_qrl import formats
from lit_qrl.errors import ConfigError
from lit_qrl.network.adapters import merged_weights
from lit_qrl.precision import QATAligned, UnifiedFP8
from lit_qrl.precision.layers import low_bit
from lit_qrl.precision.source import unchanged
from lit_qrl.receipts.ledger import SentLedger, compare
from lit_qrl.rollout.embedded.engine import TransformersEngine
from lit_qrl.rollout.engine import SamplerSpec
from lit_qrl.types import SamplingParams
from tests.families.configs import BY_TYPE, random_network
from tests.stacked_experts import holders, rounded

IDS = torch.tensor([[3, 5, 7, 11, 2, 9, 4, 6], [8, 8, 3, 1, 5, 10, 12, 5]])
PLUGINS = {
    "fp8_row": lambda: QATAligned("fp8_row"),
    "fp8_tensor": lambda: QATAligned("fp8_tensor"),
    "int4_group": lambda: QATAligned("int4_group"),
    "nvfp4": lambda: QATAligned("nvfp4"),
    "unified": lambda: UnifiedFP8(backend="emulate"),
}


def learner(kind, plugin):
    """Return a model that computes in a plugin's format, and its policy."""
    network = random_network(BY_TYPE[kind])
    module = nn.Module()
    module.policy = nn.Module()
    module.policy.network = network
    plugin.convert_module(module)
    return network, SimpleNamespace(network=network, named_weights=lambda: merged_weights(network))


def published(plugin, policy):
    engine, sent = TransformersEngine(), SentLedger(0, plugin.format)
    engine.setup(SamplerSpec(sampling=SamplingParams(max_tokens=4)), policy)
    report = engine.load_weights(
        sent.watch(plugin.source(policy, plugin.format).whole(unchanged, None)), plugin.format, 0
    )
    return engine, sent, report


@pytest.mark.parametrize("name", PLUGINS)
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "llama4_text"])
def test_the_sampler_has_the_learners_log_probs(kind, name):
    plugin = PLUGINS[name]()
    network, policy = learner(kind, plugin)
    engine, sent, report = published(plugin, policy)
    with torch.no_grad():
        expected = network(IDS).logits[:, :-1].log_softmax(-1).gather(2, IDS[:, 1:, None])[..., 0]
    torch.testing.assert_close(torch.stack(engine.score(IDS.tolist())), expected, atol=1e-5, rtol=0)
    assert not compare(sent, report.received)
    assert not report.received.unread
    experts = [name for name in report.layers if ".experts." in name and not name.endswith("_bias")]
    assert len(experts) == 2 * 4 * 3
    assert {report.layers[name] for name in experts} == {plugin.format.name}


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_gradients_are_those_of_the_rounded_model(kind, grouped, monkeypatch):
    asked = []
    if grouped:  # as on a GPU: one product for all experts
        monkeypatch.setattr(low_bit, "can_group", lambda stack, x: asked.append(x.dtype) or True)
    format = formats.get("nvfp4")
    network, _ = learner(kind, QATAligned(format))
    reference = rounded(kind, random_network(BY_TYPE[kind]), format)
    losses = [-model(IDS).logits.log_softmax(-1)[..., 5].mean() for model in (network, reference)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0], losses[1], atol=1e-5, rtol=1e-5)
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    names = [name for name, _ in network.named_parameters()]
    assert names == list(expected)
    assert any(name.endswith("experts.gate_up_proj") for name in names)
    assert bool(asked) == grouped
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-5, rtol=1e-4)


def test_names_shapes_and_weights_stay_and_a_second_call_changes_nothing():
    plugin = QATAligned("fp8_tensor")
    network, _ = learner("gpt_oss", plugin)
    plain = random_network(BY_TYPE["gpt_oss"]).state_dict()
    assert list(network.state_dict()) == list(plain)
    assert all(torch.equal(value, plain[name]) for name, value in network.state_dict().items())
    modules = [id(module) for module in network.modules()]
    plugin.convert_module(SimpleNamespace(policy=SimpleNamespace(network=network), parameters=network.parameters))
    assert [id(module) for module in network.modules()] == modules


def test_codes_follow_an_update_a_move_and_a_copy():
    plugin = QATAligned("int4_group")
    network, _ = learner("qwen3_moe", plugin)
    name = "model.layers.1.mlp.experts.3.up_proj"
    before = plugin.layers(network)[name].quantized().codes
    assert plugin.layers(network)[name].quantized().codes is before
    other = copy.deepcopy(network)
    with torch.no_grad():
        network.get_parameter("model.layers.1.mlp.experts.up_proj".replace("up_", "gate_up_")).neg_()
    assert not torch.equal(plugin.layers(network)[name].quantized().codes, before)
    assert torch.equal(plugin.layers(other)[name].quantized().codes, before)
    assert plugin.layers(other)[name].quantized().codes is not before
    wide = network.double()
    assert plugin.layers(wide)[name].weight.dtype == torch.float64


def test_a_changed_tensor_is_quantized_anew_and_the_others_go_out_as_they_are():
    plugin = QATAligned("fp8_row")
    _, policy = learner("qwen3_moe", plugin)
    plain = dict(plugin.source(policy, plugin.format).whole(unchanged, None))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    changed = dict(plugin.source(policy, plugin.format).whole(lambda n, t: t * 3 if n == name else t, None))
    different = {n for n in plain if not torch.equal(plain[n].float(), changed[n].float())}
    scales = (f"model.layers.0.mlp.experts.{e}.{p}_proj.weight_scale" for e in range(4) for p in ("gate", "up"))
    assert different >= set(scales)
    assert all(".0.mlp.experts." in n for n in different)


def test_a_shape_that_does_not_fit_is_named():
    network = random_network(BY_TYPE["qwen3_moe"])
    (name, module), *_ = holders(network).items()
    module.gate_up_proj = nn.Parameter(torch.zeros(4, 200, 128))
    module.down_proj = nn.Parameter(torch.zeros(4, 128, 100))
    with pytest.raises(ConfigError, match=rf"4 layers do not fit nvfp4: {name}.0.down_proj \(128, 100\)"):
        QATAligned("nvfp4").convert_module(network)


@pytest.mark.parametrize("name", PLUGINS)
def test_what_is_gathered_for_a_pass_goes_out_as_it_was_computed_with_and_nothing_whole_stays(name):
    """Parts in fp32 that are gathered in bf16: pass and publish have the codes of the bf16 numbers."""
    plugin, wanted = PLUGINS[name](), PLUGINS[name]()
    network, policy = learner("qwen3_moe", plugin)
    rounded_network, rounded_policy = learner("qwen3_moe", wanted)
    rounded_network.bfloat16()
    plugin.gather_in(network, torch.bfloat16)
    sent, expected = (
        dict(one.source(whose, one.format).whole(unchanged, None))
        for one, whose in ((plugin, policy), (wanted, rounded_policy))
    )
    assert sent.keys() == expected.keys()
    for tensor in plugin.source(policy, plugin.format).shapes:
        for part in (f"{tensor}.weight", f"{tensor}.weight_scale", f"{tensor}.weight_packed"):
            if part in sent:
                assert torch.equal(sent[part].float(), expected[part].float()), part
    rounded_network(IDS).logits.sum().backward()
    network.bfloat16()  # what FSDP does around each layer
    network(IDS).logits.sum().backward()
    for (where, one), other in zip(network.named_parameters(), rounded_network.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=where)
    for layer in plugin.layers(network).values():
        assert layer._cached is None
        assert layer._amax is None
        assert not layer._prepared
    assert any(layer._cached is not None for layer in wanted.layers(rounded_network).values())
