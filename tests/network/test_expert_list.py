import copy

import pytest
import torch
from torch import nn

from lit_qrl.network.expert_list import ExpertList
from lit_qrl.network.experts import expert_stacks
from tests.families.configs import BY_TYPE, random_network


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
