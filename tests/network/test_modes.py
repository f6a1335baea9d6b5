import logging
import threading

import peft
import pytest
import torch
from torch import nn
from transformers import GPT2Config, LlamaConfig, OPTConfig, PhiConfig

from lit_qrl.network.modes import evaluating, is_repeated, repeating, train_without_dropout
from lit_qrl.policy import CausalPolicy
from lit_qrl.rollout.embedded.engine import TransformersEngine
from lit_qrl.rollout.engine import SamplerSpec
from lit_qrl.types import SamplingParams
from tests.networks import batch_of, build_network, build_tokenizer

FAMILIES = {
    "gpt2": (GPT2Config, {}),
    "opt": (OPTConfig, {"ffn_dim": 64, "word_embed_proj_dim": 32, "attention_dropout": 0.1, "layerdrop": 0.1}),
    "phi": (PhiConfig, {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attention_dropout": 0.1}),
    "llama": (LlamaConfig, {"attention_dropout": 0.1}),
}
PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]


def folder_of(folder, family):
    kind, rates = FAMILIES[family]
    build_network(kind, **rates, tie_word_embeddings=family != "phi").save_pretrained(folder)
    build_tokenizer(pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    return str(folder)


def log_ratios(policy):
    """The learner's log-probs in training less those of an fp32 sampler with the same weights."""
    engine = TransformersEngine()
    spec = SamplerSpec(sampling=SamplingParams(max_tokens=6, ignore_stop=True, temperature=1.0))
    engine.setup(spec, policy)
    engine.load_weights(policy.named_weights(), None, 0)
    drawn = engine.generate(PROMPTS, 4, seed=0)
    batch = batch_of([prompt for prompt in PROMPTS for _ in range(4)], [list(one.token_ids) for one in drawn])
    sampled = torch.tensor([one.logprobs for one in drawn])
    policy.train()
    with torch.no_grad():
        return (policy(batch).logprobs - sampled).abs()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_policy_is_trained_as_its_sampler_computes(family, checkpointing, tmp_path):
    policy = CausalPolicy(folder_of(tmp_path, family), gradient_checkpointing=checkpointing)
    policy.configure()
    assert float(log_ratios(policy).max()) <= 1e-5


def test_dropout_of_an_adapter_is_off_with_a_line_that_says_so(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    lora = peft.LoraConfig(r=4, lora_alpha=64, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    policy = CausalPolicy(folder_of(tmp_path, "llama"), lora=lora)
    policy.configure()
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    assert float(log_ratios(policy).max()) <= 1e-5
    assert "lora_dropout is off" in caplog.text


def test_dropout_that_is_asked_for_is_in_training_alone(tmp_path):
    policy = CausalPolicy(folder_of(tmp_path, "gpt2"), dropout=True)
    policy.configure()
    assert float(log_ratios(policy).mean()) > 1e-2
    with evaluating(policy):
        assert not policy.network.training
        batch = batch_of([[5, 6, 7]], [[8, 9]])
        assert torch.equal(policy(batch).logprobs, policy(batch).logprobs)
    assert policy.network.training


@pytest.mark.parametrize("dropout", [False, True])
def test_gradient_checkpointing_works_where_dropout_is_off(dropout, tmp_path):
    policy = CausalPolicy(folder_of(tmp_path, "opt"), gradient_checkpointing=True, dropout=dropout)
    policy.configure()
    calls = []
    layer = policy.network.model.decoder.layers[0]
    layer.fc1.register_forward_hook(lambda *_: calls.append(1))
    policy(batch_of([[5, 6, 7]], [[8, 9]])).logprobs.sum().backward()
    assert len(calls) == 2  # once more in the backward pass
    assert layer.dropout == (0.1 if dropout else 0.0)


def test_every_module_gets_its_own_mode_back():
    network = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5)))
    network[0].eval()
    with evaluating(network):
        assert not any(module.training for module in network.modules())
    assert [module.training for module in network.modules()] == [True, False, True, True]


def test_a_checkpointed_module_loses_its_own_rates_alone():
    network = nn.Sequential(nn.Dropout(0.5))
    network.gradient_checkpointing, network.layerdrop = True, 0.3
    train_without_dropout(network)
    assert network.training
    assert network.layerdrop == 0.0
    assert network[0].p == 0.5
    assert not network[0].training


def test_a_repetition_is_known_to_its_own_thread_while_it_lasts():
    seen = []
    with repeating():
        assert is_repeated()
        with repeating():
            pass
        assert is_repeated()
        other = threading.Thread(target=lambda: seen.append(is_repeated()))
        other.start()
        other.join()
    assert seen == [False]
    assert not is_repeated()
