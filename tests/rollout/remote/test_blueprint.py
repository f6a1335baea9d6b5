"""What an engine elsewhere knows of the learner's model."""

import pickle

import torch
from peft import LoraConfig, get_peft_model

from lit_qrl.network.linears import quantizable_linears
from lit_qrl.network.padding_free import enable_padding_free, padded_attention
from lit_qrl.rollout.remote.blueprint import blueprint
from tests.networks import build_network


def test_the_model_is_built_again_without_memory():
    network = build_network().to(torch.bfloat16)
    again = pickle.loads(pickle.dumps(blueprint(network))).network
    assert type(again) is type(network)
    assert {name: (p.shape, p.dtype) for name, p in again.named_parameters()} == {
        name: (p.shape, p.dtype) for name, p in network.named_parameters()
    }
    assert {p.device.type for p in again.parameters()} == {"meta"}
    assert dict(again.named_buffers()).keys() == dict(network.named_buffers()).keys()


def test_of_a_model_with_an_adapter_it_is_the_base():
    plain = build_network()
    layers = list(quantizable_linears(plain))
    adapted = get_peft_model(plain, LoraConfig(r=2, target_modules="all-linear")).get_base_model()
    assert list(quantizable_linears(blueprint(adapted).network)) == layers


def test_the_attention_of_the_learners_process_is_not_asked_for():
    network = build_network()
    assert enable_padding_free(network)
    ours = network.config._attn_implementation
    again = pickle.loads(pickle.dumps(blueprint(network))).network
    assert ours != again.config._attn_implementation == padded_attention(ours)
