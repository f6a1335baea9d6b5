from types import SimpleNamespace

import pytest
from peft import LoraConfig
from transformers import Qwen3Config

from lit_qrl.errors import ConfigError
from lit_qrl.run.identity import check_identity, identity


def policy(lora=None, **changes):
    sizes = {"vocab_size": 24, "hidden_size": 32, "num_hidden_layers": 2}
    return SimpleNamespace(config=Qwen3Config(**{**sizes, **changes}), lora=lora)


def test_identity_is_the_shape_and_the_adapter():
    shape = {"model_type": "qwen3", "vocab_size": 24, "hidden_size": 32, "num_hidden_layers": 2}
    assert identity(policy()) == {**shape, "adapter": None, "rank": None}
    assert identity(policy(LoraConfig(r=4))) == {**shape, "adapter": "LORA", "rank": 4}


def test_a_checkpoint_of_the_same_policy_passes():
    for lora in (None, LoraConfig(r=8)):
        check_identity({"policy": identity(policy(lora))}, policy(lora))


@pytest.mark.parametrize(
    ("saved", "own", "message"),
    [
        (policy(), policy(hidden_size=64), r"Expected: hidden_size 64\. Given: hidden_size 32\."),
        (policy(), policy(vocab_size=25, num_hidden_layers=3), r"Expected: vocab_size 25, num_hidden_layers 3\."),
        (policy(), policy(LoraConfig(r=4)), r"Expected: adapter LORA, rank 4\. Given: adapter None, rank None\."),
        (policy(LoraConfig(r=4)), policy(LoraConfig(r=8)), r"Expected: rank 8\. Given: rank 4\."),
    ],
)
def test_what_differs_is_named(saved, own, message):
    with pytest.raises(ConfigError, match=message):
        check_identity({"policy": identity(saved)}, own)


@pytest.mark.parametrize("checkpoint", [{}, {"policy": None}, {"state_dict": {}, "policy": "qwen3"}])
def test_a_file_of_another_program_is_no_checkpoint_of_a_policy(checkpoint):
    with pytest.raises(ConfigError, match="holds no policy"):
        check_identity(checkpoint, policy())
