import copy

import pytest
import torch
from peft import LoraConfig

from lit_qrl.errors import ConfigError
from lit_qrl.network.compiled import checked, compile_layers
from lit_qrl.network.hidden import scored_hidden
from lit_qrl.network.memory import compute_again
from lit_qrl.network.padding_free import enable_padding_free
from tests.networks import batch_of, build_network

PROMPTS = [[5, 6, 7, 8, 9], [4], [3, 3, 12]]


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
def test_compiled_layers_compute_the_same_once_and_again_for_any_number_of_tokens(again):
    torch._dynamo.reset()
    plain = build_network()
    enable_padding_free(plain)
    compute_again(plain, again, on_cpu=True)
    made = copy.deepcopy(plain)
    compile_layers(made, backend="eager")
    for completions in ([[4, 5, 1], [6, 7, 8, 9, 10], [7, 7]], [[4] * 9, [6, 7], [1]]):
        for network in (plain, made):
            network.train()
            scored_hidden(network, batch_of(PROMPTS, completions)).states.square().sum().backward()
    for one, other in zip(plain.parameters(), made.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-4, rtol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_names_stay_and_a_copy_is_a_plain_network():
    network = build_network()
    names = list(network.state_dict())
    assert compile_layers(network, backend="eager") == len(network.model.layers)
    assert all(layer._compiled_call_impl is not None for layer in network.model.layers)
    assert list(network.state_dict()) == names
    assert all(layer._compiled_call_impl is None for layer in copy.deepcopy(network).model.layers)


def test_an_adapter_is_not_compiled():
    assert checked(True, None)
    assert not checked(False, LoraConfig())
    with pytest.raises(ConfigError, match=r"Set model\.policy\.compile to false"):
        checked(True, LoraConfig())
