"""What an adapter beside its base may be; its numbers in vLLM's memory: test_engine.py."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig

from lit_qrl.errors import ConfigError
from lit_qrl.receipts.ledger import ReceivedLedger
from lit_qrl.rollout.vllm.adapter import ADAPTER_ID, check_adapter, replace_adapter


def test_adapter_limits_are_checked():
    check_adapter(LoraConfig(r=16, target_modules=["q_proj"]), 16)
    with pytest.raises(ConfigError, match=r"at least 20\. Given: 16\. Set it to 32"):
        check_adapter(LoraConfig(r=20, target_modules=["q_proj"]), 16)
    with pytest.raises(ConfigError, match="alpha_pattern"):
        check_adapter(LoraConfig(r=8, alpha_pattern={"q_proj": 4}, target_modules=["q_proj"]), 16)


def test_a_layer_that_the_engine_does_not_adapt_is_named():
    name = "base_model.model.model.layers.0.self_attn.o_proj"
    pair = {f"{name}.lora_{end}.weight": torch.ones(2, 2) for end in "AB"}
    live = SimpleNamespace(locate_layer=lambda layer: None)
    manager = SimpleNamespace(_adapter_manager=SimpleNamespace(lora_index_to_id=[ADAPTER_ID]))
    with pytest.raises(ValueError, match=r"adapts no layer model\.layers\.0\.self_attn\.o_proj"):
        replace_adapter(live, manager, LoraConfig(r=2), iter(pair.items()), ReceivedLedger(1))
