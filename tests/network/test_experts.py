"""Stacked experts against slices taken by hand."""

import pytest
import torch
from torch import nn

from lit_qrl.errors import ConfigError
from lit_qrl.network.experts import (
    activation,
    expert_stacks,
    expert_weights,
    unknown_experts,
    unstacked,
)
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
