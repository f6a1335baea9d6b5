import copy

import pytest
import torch
from torch import nn

from lit_qrl.network.hidden import scored_hidden
from lit_qrl.network.linears import quantizable_linears
from lit_qrl.precision import QATAligned
from lit_qrl.precision.layers import joined_linear
from lit_qrl.precision.layers.joined_linear import JoinedLinear, join_linears
from tests.networks import batch_of, build_network


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(joined_linear._Plain, "takes", lambda self, x: x.requires_grad or not torch.is_grad_enabled())


def gradients(network, batch):
    network.zero_grad()
    states = scored_hidden(network, batch).states
    network.lm_head(states).log_softmax(-1).square().mean().backward()
    return states.detach(), {name: p.grad.clone() for name, p in network.named_parameters()}


@pytest.mark.parametrize("whole", [True, False])
def test_states_and_gradients_stay(whole, on_cpu, monkeypatch):
    torch.manual_seed(0)
    plain = build_network()
    network, batch = copy.deepcopy(plain), batch_of([[5, 6, 7, 8], [4]], [[4, 5, 1], [6, 7, 8, 9]])
    monkeypatch.setattr(joined_linear._Plain, "whole", whole)
    calls = []
    compute = joined_linear._Plain.compute
    monkeypatch.setattr(joined_linear._Plain, "compute", lambda self, *all: calls.append(1) or compute(self, *all))
    layers = len(network.model.layers)
    for _ in range(2):  # the second changes nothing
        join_linears(network)
        assert sum(isinstance(part, JoinedLinear) for part in network.modules()) == 7 * layers
    (states, made), (expected, theirs) = gradients(network, batch), gradients(plain, batch)
    assert len(calls) == 4 * layers
    torch.testing.assert_close(states, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(made, theirs, atol=1e-4, rtol=1e-4)


def test_names_stay_and_plugins_find_linear_layers():
    network = build_network()
    names, found = list(network.state_dict()), set(quantizable_linears(network))
    join_linears(network)
    assert list(network.state_dict()) == names
    assert set(quantizable_linears(network)) == found
    assert type(network.lm_head) is nn.Linear
    copied = copy.deepcopy(network).model.layers[0].self_attn
    assert copied.q_proj.together.layers == (copied.q_proj, copied.k_proj, copied.v_proj)
    QATAligned("fp8_row").convert_module(network)
    assert not any(isinstance(part, JoinedLinear) for part in network.modules())


def test_few_tokens_a_cpu_and_autocast_take_each_layer_s_own_product(monkeypatch):
    network = build_network()
    join_linears(network)
    layer = network.model.layers[0].self_attn.q_proj.bfloat16()
    group = layer.together
    for one in group.layers:
        one.bfloat16()
    many = torch.zeros(joined_linear.ROWS, layer.in_features, dtype=torch.bfloat16)
    assert not group.takes(many)
    monkeypatch.setattr(joined_linear.dispatch, "available", lambda x, kernel: True)
    assert group.takes(many)
    assert not group.takes(many[1:])
    assert not group.takes(many.float())
    with torch.autocast("cpu", torch.bfloat16):
        assert not group.takes(many)
    group.layers[1].float()
    assert not group.takes(many)


def test_weights_are_laid_together_where_keys_and_values_are_few():
    def layers(*sizes):
        return joined_linear._Plain([nn.Linear(8, size) for size in sizes])

    assert layers(8, 2, 2).whole
    assert not layers(8, 8, 8).whole
    assert not layers(16, 16).whole
