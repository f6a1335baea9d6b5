import copy

import pytest
import torch
from torch import nn

from lit_qrl.errors import ConfigError
from lit_qrl.network.experts import ExpertList, activation, expert_stacks, expert_weights, unknown_experts, unstacked
from lit_qrl.network.structure import outline
from tests.families.configs import BY_TYPE, random_network
from tests.stacked_experts import by_hand

FUSED = ("gate_proj", "up_proj", "down_proj")
NAMES = {
    "qwen3_moe": ("model.layers.{}.mlp.experts", FUSED, (0, 1)),
    "mixtral": ("model.layers.{}.mlp.experts", ("w1", "w3", "w2"), (0, 1)),
    "deepseek_v3": ("model.layers.{}.mlp.experts", FUSED, (1,)),
    "glm4_moe": ("model.layers.{}.mlp.experts", FUSED, (1,)),
    "gpt_oss": ("model.layers.{}.mlp.experts", FUSED, (0, 1)),
    "llama4_text": ("model.layers.{}.feed_forward.experts", FUSED, (0, 1)),
}
"""Where the experts of each family are, what a checkpoint calls the matrices of one, and which layers have them."""


@pytest.mark.parametrize("kind", NAMES)
def test_stacks_are_found_and_sliced_as_checkpoints_name_them(kind):
    network = random_network(BY_TYPE[kind])
    pattern, (gate, up, down), layers = NAMES[kind]
    stacks = expert_stacks(network)
    assert list(stacks) == [pattern.format(layer) for layer in layers]
    name = pattern.format(layers[0])
    stack, module = stacks[name], network.get_submodule(name)
    assert stack.count == 4
    assert stack.apart == (kind not in ("gpt_oss", "llama4_text"))
    found = {
        layer: weight
        for matrix in stack.parts
        for layer, weight in stack.named(matrix, module.get_parameter(matrix).detach())
    }
    assert {layer: tuple(weight.shape) for layer, weight in found.items()} == stack.layers()
    for expert in range(4):
        expected = by_hand(kind, module.gate_up_proj[expert].detach(), module.down_proj[expert].detach())
        for leaf, weight in zip((gate, up, down), expected, strict=True):
            assert torch.equal(found[f"{name}.{expert}.{leaf}"], weight)
    for matrix in stack.parts:
        assert torch.equal(stack.joined(matrix, found), module.get_parameter(matrix))


def test_experts_without_a_gate():
    class Experts(nn.Module):
        has_gate, act_fn = False, nn.ReLU()

    rows = torch.tensor([[-1.0, 2.0]])
    assert activation(Experts())(rows).tolist() == [[0.0, 2.0]]


def test_a_stream_comes_apart_and_the_rest_of_it_passes():
    network = random_network(BY_TYPE["qwen3_moe"])
    stacks = expert_stacks(network)
    plain = dict(network.named_parameters())
    stream = dict(unstacked(plain.items(), stacks))
    gone = {f"{name}.{matrix}" for name in stacks for matrix in ("gate_up_proj", "down_proj")}
    assert set(plain) - set(stream) == gone
    assert set(stream) - set(plain) == {f"{layer}.weight" for stack in stacks.values() for layer in stack.layers()}
    assert sum(one.numel() for one in stream.values()) == sum(one.numel() for one in plain.values())
    one = stream["model.layers.0.mlp.experts.2.up_proj.weight"]
    assert one.data_ptr() == plain["model.layers.0.mlp.experts.gate_up_proj"][2, 128:].data_ptr()  # no copy


@pytest.mark.parametrize(
    "globs", [["*.experts"], ["*.experts.*"], ["model.layers.0.*"], ["*.gate_up_proj", "*.experts.*.down_proj"]]
)
def test_globs_leave_a_layers_experts_out_together(globs):
    network = outline(BY_TYPE["qwen3_moe"].config())
    left = expert_stacks(network, globs)
    assert list(left) == (["model.layers.1.mlp.experts"] if globs == ["model.layers.0.*"] else [])


@pytest.mark.parametrize("glob", ["*.down_proj", "*.experts.3.*", "*.up_proj", "*.gate_up_proj"])
def test_globs_that_split_a_layers_experts_are_refused(glob):
    with pytest.raises(ConfigError, match=r"split the experts of model.layers.0.mlp.experts.*all matrices"):
        expert_stacks(outline(BY_TYPE["qwen3_moe"].config()), [glob])


def test_experts_that_lie_in_another_way_are_named():
    class Experts(nn.Module):
        def __init__(self, rows, is_transposed=False):
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.zeros(2, rows, 4))
            self.down_proj = nn.Parameter(torch.zeros(2, 4, 8))
            if is_transposed is not None:
                self.is_transposed = is_transposed

    known = nn.ModuleDict({"experts": Experts(16)})
    assert list(expert_stacks(known)) == ["experts"]
    assert not unknown_experts(known)
    for odd in (Experts(16, None), Experts(16, True), Experts(10)):
        root = nn.ModuleDict({"experts": odd})
        assert not expert_stacks(root)
        assert list(unknown_experts(root)) == list(expert_weights(root))
        assert not unknown_experts(root, ["experts"])


def apart(network):
    """Put plain linear layers in the place of a model's first stack; return its name and the stack as it was."""
    (name, stack), *_ = expert_stacks(network).items()
    module = network.get_submodule(name)
    before = {key: one.detach().clone() for key, one in module.named_parameters()}
    layers = ExpertList(stack, module, lambda shape: nn.Linear(shape[1], shape[0], bias=False))
    for matrix in stack.parts:
        for layer, weight in stack.named(matrix, before[matrix]):
            layers.get_submodule(layer.removeprefix(f"{name}.")).weight.data = weight.clone()
    network.set_submodule(name, layers)
    return name, before


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss", "llama4_text"])
def test_experts_held_apart_compute_as_the_stack(kind):
    plain = random_network(BY_TYPE[kind])
    network = copy.deepcopy(plain)
    name, before = apart(network)
    for ids in (torch.arange(3, 13)[None], torch.tensor([[3]])):  # of one token most experts get no row
        with torch.no_grad():
            torch.testing.assert_close(network(ids).logits, plain(ids).logits, atol=1e-4, rtol=1e-5)
    held = network.get_submodule(name)
    assert held(torch.zeros(0, 128), torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2)).shape == (0, 128)
    biases = {key for key in before if key.endswith("_bias")}
    assert biases == ({"gate_up_proj_bias", "down_proj_bias"} if kind == "gpt_oss" else set())
    assert set(held._parameters) == biases
    for matrix, tensor in held.joined(lambda layer: layer.weight.detach()).items():
        assert torch.equal(tensor, before[matrix])
    assert list(expert_stacks(network)) == list(expert_stacks(plain))
    # the family's own module gave its matrices up, and gets the biases back
    assert held.plain.gate_up_proj.device.type == "meta"
    assert all(torch.equal(getattr(held.plain, key), before[key]) for key in biases)
