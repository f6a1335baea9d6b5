from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from transformers import Qwen3Config

from lit_qrl.errors import ConfigError
from lit_qrl.run.checkpoint_files import check_frozen, check_identity, describe_frozen, identity


def policy(lora=None, **changes):
    sizes = {"vocab_size": 24, "hidden_size": 32, "num_hidden_layers": 2}
    return SimpleNamespace(config=Qwen3Config(**{**sizes, **changes}), lora=lora)


def test_identity_is_the_shape_and_the_adapter():
    shape = {"model_type": "qwen3", "vocab_size": 24, "hidden_size": 32, "num_hidden_layers": 2}
    assert identity(policy()) == {**shape, "adapter": None, "rank": None}
    assert identity(policy(LoraConfig(r=4))) == {**shape, "adapter": "LORA", "rank": 4}
    for lora in (None, LoraConfig(r=8)):
        check_identity({"policy": identity(policy(lora))}, policy(lora))
    with pytest.raises(ConfigError, match=r"layers 3, rank 8\. Given: num_hidden_layers 2, rank 4\."):
        check_identity({"policy": identity(policy(LoraConfig(r=4)))}, policy(LoraConfig(r=8), num_hidden_layers=3))


def frozen(value=1.0):
    return {"policy.base": torch.full((70, 3), value), "policy.count": torch.arange(3)}


def test_another_frozen_base_is_refused_and_another_dtype_of_the_same_numbers_is_not():
    checkpoint = {"policy": {"frozen": describe_frozen(frozen())}}
    check_frozen(checkpoint, {**frozen(), "policy.lora_A": torch.ones(1)})
    check_frozen(checkpoint, {**frozen(), "policy.base": frozen()["policy.base"].bfloat16()})
    other = frozen()
    other["policy.base"][0, 0] = 1.5
    for tensors in (other, frozen(2.0), {}):
        with pytest.raises(ConfigError, match=r"another base.*model\.policy"):
            check_frozen(checkpoint, tensors)
    check_frozen({"policy": {}}, {})
