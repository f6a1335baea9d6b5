import pytest
import torch
from transformers import CohereConfig, Gemma2Config, GraniteConfig, LlamaConfig

from lit_qrl.errors import ConfigError
from lit_qrl.rollout.network import head_logits, merged_weights, output_head
from tests.networks import build_network


@pytest.mark.parametrize(
    ("config_class", "changes"),
    [
        (LlamaConfig, {}),
        (Gemma2Config, {"final_logit_softcapping": 3.0}),
        (CohereConfig, {"logit_scale": 0.3}),
        (GraniteConfig, {"logits_scaling": 2.5}),
    ],
)
def test_logits_are_the_models_own(config_class, changes):
    network = build_network(config_class, **changes)
    tokens = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        hidden = network.base_model(input_ids=tokens).last_hidden_state
        torch.testing.assert_close(head_logits(hidden, output_head(network)), network(tokens).logits)


def test_a_replaced_head_is_refused():
    network = build_network()
    network.lm_head = torch.nn.Sequential(network.lm_head)
    with pytest.raises(ConfigError, match="plain linear"):
        output_head(network)


def test_weights_come_in_the_models_order_without_gradient():
    network = build_network()
    named = list(merged_weights(network))
    assert [name for name, _ in named] == [name for name, _ in network.named_parameters()]
    assert not any(tensor.requires_grad for _, tensor in named)
    assert all(tensor.data_ptr() == network.get_parameter(name).data_ptr() for name, tensor in named)


def test_persistent_buffers_are_weights_and_others_are_not():
    network = build_network()
    network.model.register_buffer("kept", torch.ones(2))
    network.model.register_buffer("derived", torch.ones(2), persistent=False)
    names = {name for name, _ in merged_weights(network)}
    assert "model.kept" in names
    assert "model.derived" not in names
