import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lit_qrl.network.autocast import computing_in


@pytest.fixture
def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.LayerNorm(24), nn.Linear(24, 8, bias=False)).requires_grad_(False)


def test_products_are_those_of_autocast_and_weights_are_cast_once(network, monkeypatch):
    x = torch.randn(3, 16)
    with torch.autocast("cpu", torch.bfloat16):
        expected = network(x)
    seen = []
    monkeypatch.setattr(F, "linear", lambda *given, plain=F.linear: seen.append(given[1:]) or plain(*given))
    with computing_in(network, "cpu", torch.bfloat16):
        assert torch.equal(network(x), expected)
        assert torch.equal(network(x), expected)
    assert expected.dtype == torch.bfloat16
    assert [tuple(part.dtype for part in given if part is not None) for given in seen[:2]] == [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16,),
    ]
    assert seen[0][0] is seen[2][0]
    assert not torch.equal(network(x), expected)


def test_a_weight_that_is_replaced_is_cast_anew(network):
    x = torch.randn(3, 16)
    with computing_in(network, "cpu", torch.bfloat16):
        before = network(x)
        network[0].weight = nn.Parameter(2 * network[0].weight, requires_grad=False)
        network[0].bias = nn.Parameter(network[0].bias + 1, requires_grad=False)
        after = network(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(after, network(x))
    assert not torch.equal(after, before)


def test_one_inside_another_leaves_it_as_it_was(network):
    x = torch.randn(3, 16)
    plain = network(x)
    with computing_in(network, "cpu", torch.bfloat16):
        expected = network(x)
        with computing_in(network, "cpu", torch.bfloat16):
            assert torch.equal(network(x), expected)
        with computing_in(network, "cpu", None):
            assert torch.equal(network(x), plain)
        assert torch.equal(network(x), expected)
    assert not any("forward" in vars(part) for part in network.modules())
