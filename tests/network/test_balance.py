import pytest
import torch
from torch import nn

from lit_qrl.errors import ConfigError
from lit_qrl.network.balance import balance_coefficient, balance_loss, real_tokens, router_logits
from lit_qrl.network.structure import outline
from tests.families.configs import BY_TYPE, random_network
from tests.networks import build_network

FAMILIES = ["qwen3_moe", "mixtral", "gpt_oss"]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", FAMILIES)
def test_value_and_gradient_are_those_of_transformers(kind, padded):
    network = random_network(BY_TYPE[kind]).requires_grad_(True)
    tokens = torch.arange(3, 23).view(2, 10) % network.config.vocab_size
    lengths = torch.tensor([10, 6]) if padded else torch.tensor([10, 10])
    mask = (torch.arange(10) < lengths[:, None]).long()
    expected = network(input_ids=tokens, attention_mask=mask, output_router_logits=True).aux_loss
    given = torch.autograd.grad(expected, list(network.parameters()), allow_unused=True)
    with router_logits(network) as seen:
        network(input_ids=tokens, attention_mask=mask)
    real = real_tokens(len(seen[0]), lengths, 10)
    value = balance_loss(seen, network.config.num_experts_per_tok, real if padded else None)
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=0)
    found = torch.autograd.grad(value, list(network.parameters()), allow_unused=True)
    assert any(gradient is not None and gradient.abs().max() > 0 for gradient in given)
    for one, other in zip(found, given, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)
    network(input_ids=tokens)  # no hook stays behind
    assert len(seen) == network.config.num_hidden_layers


def test_the_factor_is_the_users_or_the_configs():
    network = outline(BY_TYPE["qwen3_moe"].config())
    assert balance_coefficient(network, None) == network.config.router_aux_loss_coef > 0
    assert balance_coefficient(network, 0.25) == 0.25
    assert balance_coefficient(nn.Linear(1, 1), 0.0) == 0


@pytest.mark.parametrize("given", [None, 0.1])
def test_models_that_have_no_such_loss_are_refused_by_name(given):
    for network in (build_network(), outline(BY_TYPE["deepseek_v3"].config())):
        said = f"experts, and {type(network).__name__} is not trained.*{given or 'null'}.*Set it to 0"
        with pytest.raises(ConfigError, match=said):
            balance_coefficient(network, given)
