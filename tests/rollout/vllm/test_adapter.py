"""An adapter in vLLM's memory, with stand-ins for vLLM's LoRA manager."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig

from lit_qrl.errors import ConfigError
from lit_qrl.receipts.ledger import PublishError, ReceivedLedger, SentLedger, compare
from lit_qrl.rollout.vllm import adapter as module
from lit_qrl.rollout.vllm.adapter import ADAPTER_ID, check_adapter, replace_adapter
from lit_qrl.rollout.vllm.locations import Place


def test_adapter_limits_are_checked():
    check_adapter(LoraConfig(r=16, target_modules=["q_proj"]), 16)
    with pytest.raises(ConfigError, match=r"at least 20\. Given: 16\. Set it to 32"):
        check_adapter(LoraConfig(r=20, target_modules=["q_proj"]), 16)
    with pytest.raises(ConfigError, match="alpha_pattern"):
        check_adapter(LoraConfig(r=8, alpha_pattern={"q_proj": 4}, target_modules=["q_proj"]), 16)


RANK, ROOM, WIDTH = 2, 8, 6
CONFIG = LoraConfig(r=RANK, target_modules=["q_proj"])
NAMES = ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"]


def stacked(rows, columns):
    return torch.full((3, 1, rows, columns), 7.0)  # three slots, full of an older adapter


@pytest.fixture
def live(monkeypatch):
    """One fused layer with two parts, its adapter in the second of three slots."""
    wrapper = SimpleNamespace(
        lora_a_stacked=[stacked(ROOM, WIDTH) for _ in NAMES], lora_b_stacked=[stacked(size, ROOM) for size in (4, 2)]
    )
    manager = SimpleNamespace(modules={"fused": wrapper}, lora_index_to_id=[None, None, None])
    made = []

    def make_room(*args):
        made.append(args)
        manager.lora_index_to_id[1] = ADAPTER_ID

    monkeypatch.setattr(module, "register_adapter", make_room)
    holder = SimpleNamespace(_adapter_manager=manager)
    places = {name: Place("fused", None, "weight", part) for part, name in enumerate(NAMES)}
    return SimpleNamespace(manager=holder, locate_layer=places.get, wrapper=wrapper, made=made)


def factors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, size in zip(NAMES, (4, 2), strict=True):
        made[f"base_model.model.{name}.lora_A.weight"] = torch.randn(RANK, WIDTH, generator=generator)
        made[f"base_model.model.{name}.lora_B.weight"] = torch.randn(size, RANK, generator=generator)
    return made


def sent(tensors, version=1):
    ledger = SentLedger(version)
    for name, tensor in tensors.items():
        ledger.record(name, tensor)
    return ledger


@pytest.mark.parametrize(("rslora", "scaling"), [(False, 3.0), (True, 6 / 2**0.5)])
def test_each_part_lies_in_its_slot_scaled_and_the_rest_is_zero(live, rslora, scaling):
    config = LoraConfig(r=RANK, lora_alpha=6, target_modules=["q_proj", "k_proj"], use_rslora=rslora)
    for version in (1, 2):
        tensors, ledger = factors(version), ReceivedLedger(version)
        replace_adapter(live, live.manager, config, iter(tensors.items()), ledger)
        assert compare(sent(tensors, version), ledger) == []
    assert len(live.made) == 1  # later publishes write into the same memory
    for part, (a, b) in enumerate(zip(live.wrapper.lora_a_stacked, live.wrapper.lora_b_stacked, strict=True)):
        name = f"base_model.model.{NAMES[part]}"
        assert torch.equal(a[1, 0, :RANK], tensors[f"{name}.lora_A.weight"])
        torch.testing.assert_close(b[1, 0, :, :RANK], scaling * tensors[f"{name}.lora_B.weight"])
        assert not a[1, 0, RANK:].any()
        assert not b[1, 0, :, RANK:].any()
        assert a[[0, 2]].eq(7).all()


def test_half_a_layer_leaves_the_old_adapter(live):
    half = {name: tensor for name, tensor in factors().items() if not name.endswith("k_proj.lora_B.weight")}
    with pytest.raises(PublishError, match=r"k_proj\.lora_B\.weight"):
        replace_adapter(live, live.manager, CONFIG, iter(half.items()), ReceivedLedger(1))
    assert all(tensor.eq(7).all() for tensor in live.wrapper.lora_a_stacked)


def test_a_layer_that_the_engine_does_not_adapt_is_named(live):
    tensors = {name.replace("q_proj", "o_proj"): tensor for name, tensor in factors().items() if "q_proj" in name}
    with pytest.raises(ValueError, match=r"adapts no layer model\.layers\.0\.self_attn\.o_proj"):
        replace_adapter(live, live.manager, CONFIG, iter(tensors.items()), ReceivedLedger(1))
